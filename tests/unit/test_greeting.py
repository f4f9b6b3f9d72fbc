"""The greeting: protocol, proof of the secret, and all that must not pass for one."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.errors import WireError
from servekit.wire.frames import PROTOCOL, Frame, FrameReader, Hello, Kind, encode
from servekit.wire.greeting import Greeting

SECRET = b"the app's own secret"
CLIENT = Hello(service="Search", replica="gateway-1")
SERVER = Hello(service="Embedder", replica="Embedder-0", version="7")

pack = msgspec.msgpack.encode


def greeting(*, client: bool, secret: bytes = b"") -> Greeting:
    return Greeting(CLIENT if client else SERVER, client=client, secret=secret)


def frames(buffers) -> list[Frame]:
    data = b"".join(buffers)
    reader = FrameReader(4096)
    reader.get_buffer()[: len(data)] = data
    return list(reader.received(len(data)))


def hello(**fields) -> Frame:
    return Kind.HELLO, 0, pack(Hello(**fields)), []


def talk(one: Greeting, other: Greeting) -> list[Frame]:
    """Let two sides greet each other until nobody has more to say; returns all that was said."""
    said = []
    to_other, to_one = frames(one.start()), frames(other.start())
    while to_other or to_one:
        said += to_other + to_one
        answers = [b for frame in to_other for b in other.receive(frame)]
        to_other = [f for frame in to_one for f in frames(one.receive(frame))]
        to_one = frames(answers)
    return said


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_both_sides_learn_who_the_other_is(secret):
    client, server = greeting(client=True, secret=secret), greeting(client=False, secret=secret)
    talk(client, server)
    assert client.done
    assert server.done
    assert server.peer is not None
    assert (server.peer.service, server.peer.replica) == ("Search", "gateway-1")
    assert client.peer is not None
    assert (client.peer.replica, client.peer.version) == ("Embedder-0", "7")


def test_the_secret_itself_is_never_sent():
    said = talk(greeting(client=True, secret=SECRET), greeting(client=False, secret=SECRET))
    assert all(SECRET not in bytes(frame[2]) for frame in said)
    assert [kind for kind, *_ in said] == [Kind.HELLO, Kind.HELLO, Kind.AUTH]


def test_every_greeting_has_nonces_of_its_own():
    pairs = [
        talk(greeting(client=True, secret=SECRET), greeting(client=False, secret=SECRET))
        for _ in range(50)
    ]
    headers = {bytes(frame[2]) for said in pairs for frame in said}
    assert len(headers) == 150


def test_the_server_keeps_quiet_about_itself_until_it_must():
    # Who challenges first learns nothing but the name; the client proves itself before the server.
    server = greeting(client=False, secret=SECRET)
    (first,) = frames(server.start())
    assert msgspec.msgpack.decode(first[2], type=Hello).proof == b""
    assert greeting(client=True, secret=SECRET).start() == []


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, b"wrong"), (SECRET, SECRET[:-1])])
def test_a_wrong_secret_is_refused_by_the_server(ours, theirs):
    client, server = greeting(client=True, secret=theirs), greeting(client=False, secret=ours)
    with pytest.raises(WireError, match="does not know the app's secret"):
        talk(client, server)
    assert not server.done
    assert not client.done


@pytest.mark.parametrize("client_has_it", [True, False])
def test_one_side_without_a_secret_is_refused(client_has_it):
    client = greeting(client=True, secret=SECRET if client_has_it else b"")
    server = greeting(client=False, secret=b"" if client_has_it else SECRET)
    with pytest.raises(WireError, match="brings no proof|wants proof"):
        talk(client, server)
    assert not (server.done and client.done)


def test_a_server_that_does_not_know_the_secret_is_refused_by_the_client():
    client = greeting(client=True, secret=SECRET)
    client.receive(hello(nonce=b"n" * 16))
    assert not client.done
    for proof in (b"", b"p" * 32):
        with pytest.raises(WireError, match="does not know"):
            client.receive((Kind.AUTH, 0, proof, []))
    assert not client.done


def test_a_recorded_greeting_can_not_be_replayed():
    said = talk(greeting(client=True, secret=SECRET), greeting(client=False, secret=SECRET))
    recorded = said[1]
    assert msgspec.msgpack.decode(recorded[2], type=Hello).proof
    server = greeting(client=False, secret=SECRET)
    server.start()
    with pytest.raises(WireError, match="does not know"):
        server.receive(recorded)


def test_a_proof_can_not_be_reflected():
    # Somebody without the secret lets the client prove itself, and sends that proof back as AUTH.
    client = greeting(client=True, secret=SECRET)
    (answer,) = frames(client.receive(hello(nonce=b"n" * 16)))
    proof = msgspec.msgpack.decode(answer[2], type=Hello).proof
    with pytest.raises(WireError, match="does not know"):
        client.receive((Kind.AUTH, 0, proof, []))


def test_the_server_s_own_challenge_can_not_be_sent_back_to_it():
    server = greeting(client=False, secret=SECRET)
    (challenge,) = frames(server.start())
    with pytest.raises(WireError, match="does not know"):
        server.receive(challenge)


def test_a_proof_of_one_side_is_none_of_the_other():
    side = greeting(client=True, secret=SECRET)
    one, other = b"1" * 16, b"2" * 16
    proofs = {
        side._proof(b"client", one, other),
        side._proof(b"client", other, one),
        side._proof(b"server", one, other),
        side._proof(b"server", other, one),
    }
    assert len(proofs) == 4


@pytest.mark.parametrize("nonce", [b"", b"short", b"n" * 15, b"n" * 17])
@pytest.mark.parametrize("client", [True, False])
def test_a_nonce_of_another_length_is_refused(nonce, client):
    side = greeting(client=client, secret=SECRET)
    with pytest.raises(WireError, match="no proof"):
        side.receive(hello(nonce=nonce, proof=b"p" * 32))


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1, -1])
@pytest.mark.parametrize("secret", [b"", SECRET])
def test_another_protocol_is_refused_with_a_hint(protocol, secret):
    side = greeting(client=False, secret=secret)
    with pytest.raises(WireError, match="same servekit version"):
        side.receive(hello(protocol=protocol, nonce=b"n" * 16))
    assert not side.done


@pytest.mark.parametrize(
    "kind", [k for k in vars(Kind).values() if isinstance(k, int) and k != Kind.HELLO]
)
@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("client", [True, False])
def test_nothing_else_comes_first(kind, secret, client):
    side = greeting(client=client, secret=secret)
    with pytest.raises(WireError, match="within the greeting"):
        side.receive((kind, 0, b"", []))
    assert not side.done


def test_a_second_hello_is_refused():
    client = greeting(client=True, secret=SECRET)
    client.receive(hello(nonce=b"n" * 16))
    with pytest.raises(WireError, match="within the greeting"):
        client.receive(hello(nonce=b"n" * 16))


def test_a_server_takes_no_auth():
    server = greeting(client=False, secret=SECRET)
    with pytest.raises(WireError, match="within the greeting"):
        server.receive((Kind.AUTH, 0, b"p" * 32, []))


@given(header=st.binary(max_size=100), client=st.booleans(), secret=st.sampled_from([b"", SECRET]))
def test_any_header_is_refused_or_a_hello(header, client, secret):
    side = greeting(client=client, secret=secret)
    try:
        side.receive((Kind.HELLO, 0, header, []))
    except (WireError, msgspec.DecodeError):
        assert not side.done
    else:
        assert side.peer is not None
    assert not (secret and side.done)


def test_what_is_said_fits_into_one_small_frame():
    for side in (greeting(client=True), greeting(client=False, secret=SECRET)):
        (frame,) = frames(side.start())
        assert frame[:2] == (Kind.HELLO, 0)
    assert len(b"".join(encode(Kind.HELLO, 0, pack(CLIENT)))) < 4096
