"""Container images without a daemon: files go in, an OCI image comes out, the same one each time.

::

    reference    names of images                  documents    manifests and configs, as JSON
    blobs        the content-addressed folder     tar          what is in a tar, one member at a time
    layer        files → one compressed layer     cache        a layer that has not changed
    base         what an image starts from        rootfs       the files that are in it
    image        base + layers + settings → image
    layout       image → folder or tar, and back
    registry     one registry's HTTP API          transfer     images and artefacts over it
    challenge    what it asks for first           credentials  who we are there

What others wrote (bases, layouts, answers of registries) is believed only as far as its digests go, is
never unpacked to the disk, and has a limit on each size.
"""
