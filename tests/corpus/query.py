"""Query strings for `greet(name: str, times: int = 1)`."""

from tests.corpus.nasty import rows

QUERY = rows(
    nothing=(b"", "name"),
    text_as_number=(b"name=a&times=many", "times"),
    float_as_int=(b"name=a&times=1.5", "times"),
    infinite=(b"name=a&times=1e400", "times"),
    nan=(b"name=a&times=NaN", "times"),
    list_as_int=(b"name=a&times=[1]", "times"),
    object_as_int=(b"name=a&times={}", "times"),
    deep=(b"name=a&times=" + b"[" * 10_000, "times"),
    digits=(b"name=a&times=" + b"9" * 5000, "times"),
    empty_number=(b"name=a&times=", "times"),
    last_of_duplicates=(b"name=a&times=1&times=x", "times"),
    unknown=(b"name=a&nmae=b", "nmae"),
    no_name=(b"name=a&=b", ""),
    brackets=(b"name=a&name[]=b", "name[]"),
    null_bytes=(b"name=a&%00=1", "\0"),
    bad_percent=(b"name=a&%zz=1", "%zz"),
    not_utf_8=(b"name=a&%ff=1", "\ufffd"),
)
