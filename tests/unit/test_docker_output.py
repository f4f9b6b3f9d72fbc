"""Output of a container: lines, without secrets and without what moves a cursor."""

from servekit.packaging.docker.output import TAIL, Output


def lines(*chunks, values=()):
    found = []
    output = Output(values, found.append)
    for out, err in chunks:
        output.feed(out, err)
    output.close()
    assert [*output.tail] == found[-TAIL:]
    return found


def test_lines_come_whole_and_by_stream():
    assert lines((b"a", None), (None, b"x\n"), (b"b\r\nc", b"y")) == ["x", "ab", "c", "y"]
    assert lines((b"10 %\r20 %\r", None)) == ["10 %", "20 %"]
    assert lines() == []


def test_a_secret_is_masked_wherever_chunks_end():
    text = b"before s3cret after s3crets3cret\n"
    for cut in range(len(text)):
        found = lines((text[:cut], None), (None, b"-\n"), (text[cut:], None), values=["s3cret"])
        assert sorted(found) == ["-", "before *** after ******"]


def test_each_line_of_a_secret_is_masked():
    value = "{\n  key: abcd\n  other: efgh\n}\n"
    assert lines((b"{\nkey: abcd\nis other: efgh.\n}\n", None), values=[value]) == [
        *("{", "***", "is ***.", "}")
    ]


def test_the_longest_secret_goes_first_and_an_empty_one_hides_nothing():
    assert lines((b"abcdef abc\n", None), values=["abc", "abcdef", ""]) == ["*** ***"]


def test_what_paints_and_moves_is_left_out():
    assert lines((b"\x1b[1;31mred\x1b[0m \x07\xff\x00.\n", None)) == ["red \ufffd."]
    assert lines((b"to\x1b[1mken\n", None), values=["token"]) == ["***"]


def test_the_end_is_kept():
    found = []
    output = Output((), found.append)
    output.feed(b"".join(b"%d\n" % n for n in range(100)))
    assert [*output.tail] == found[-40:] == [str(n) for n in range(60, 100)]
