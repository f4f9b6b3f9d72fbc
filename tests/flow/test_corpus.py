"""Every nasty of the corpus at a running app: refused, at the right field, and nothing is harmed."""

import asyncio

import pytest

from tests.corpus import PARSERS, Parser
from tests.flow.harness import PATIENCE_S, Answer, Http, of_a_file


@pytest.fixture(scope="module")
def app():
    yield from of_a_file("kinds.py:Http")


async def send(http: Http, parser: Parser, body: bytes) -> Answer:
    path = f"/{parser.endpoint}"
    async with asyncio.timeout(PATIENCE_S):
        if not parser.media:
            return await http.call("GET", f"{path}?{body.decode('latin-1')}")
        headers = {"content-type": parser.media, "accept": parser.media}
        return await http.call("POST", path, body=body, headers=headers)


@pytest.mark.parametrize("name", PARSERS)
async def test_every_nasty_is_refused(app, name):
    parser = PARSERS[name]
    before = app.processes()
    wrong = []
    async with await Http.open(app.url) as http:
        good = await send(http, parser, parser.good)
        assert good.status == 200, good.body
        for nasty in parser.nasties:
            answer = await send(http, parser, nasty.body)
            error = answer.json.get("error", {}) if answer.status >= 400 else {}
            fields = [field["path"] for field in error.get("fields", [])]
            wanted = (400, []) if nasty.field is None else (422, [nasty.field])
            if (answer.status, fields[:1]) != wanted or len(answer.body) > 10_000:
                wrong.append((nasty.name, answer.status, fields[:1], answer.body[:200]))
            again = await send(http, parser, parser.good)
            assert (again.status, again.body) == (200, good.body), nasty.name
    assert not wrong, "\n".join(map(str, wrong))
    assert app.processes() == before


@pytest.mark.parametrize("name", PARSERS)
async def test_a_parser_takes_no_other_s_bodies(app, name):
    """Each corpus, and what is good elsewhere, is no 5xx anywhere."""
    parser = PARSERS[name]
    async with await Http.open(app.url) as http:
        for other in PARSERS.values():
            if bool(other.media) is not bool(parser.media):
                continue
            for body in (other.good, *(nasty.body for nasty in other.nasties)):
                assert (await send(http, parser, body)).status in (200, 400, 422), body[:100]
