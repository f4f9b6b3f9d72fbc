"""A Docker engine: it makes what our own writer can't, and runs an app.

`prepare` turns a base into one with packages of Debian and what commands leave; `load` has an image of
ours in the engine. A `Deployment` is one app as several containers of one image, behind one port:

::

    NAME-port          holds the network and the published port, and does nothing else
    NAME-xxxxxxxx-1    the app, in that network: its gateways, its replicas
    NAME-xxxxxxxx-2    the same again; both take connections from one listening socket

A new revision starts beside the old one, takes its socket (`engine/handover.py`), and then the old one
drains. So the port never closes, and there is no proxy in front.
"""
