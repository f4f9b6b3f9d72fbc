"""`sk.Image`: checked when it is made, and read from a module without importing it."""

import msgspec
import pytest

import servekit as sk
from servekit.errors import ConfigError, SpecError
from servekit.packaging.declared import image_of
from servekit.spec.container import Command, Image, Requirement
from servekit.spec.describe import describe


def test_each_method_makes_another_image():
    first = sk.Image("base:1", python="3.12")
    image = (
        first.apt("ffmpeg", "libgomp1=12.2.0-14")
        .run("ldconfig", "-v")
        .run("get", "model", secrets=["HF_TOKEN"])
        .packages("torch==2.6", index="https://wheels.example.com/cpu")
        .packages("numpy")
        .lockfile("locks/pylock.toml")
        .include("data/**")
        .env(A="1")
        .env(B="2")
        .secrets("HF_TOKEN")
    )
    assert first == sk.Image("base:1", python="3.12")
    assert image == Image(
        base="base:1",
        python="3.12",
        system_packages=("ffmpeg", "libgomp1=12.2.0-14"),
        commands=(
            Command(argv=("ldconfig", "-v")),
            Command(argv=("get", "model"), secrets=("HF_TOKEN",)),
        ),
        requirements=(
            Requirement(text="torch==2.6", index="https://wheels.example.com/cpu"),
            Requirement(text="numpy"),
        ),
        lock="locks/pylock.toml",
        included=("data/**",),
        variables={"A": "1", "B": "2"},
        secret_names=("HF_TOKEN",),
    )
    assert msgspec.json.decode(msgspec.json.encode(image), type=Image) == image


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda i: i.apt("two words"), "no name of a package"),
        (lambda i: i.apt("$(reboot)"), "no name of a package"),
        (lambda i: i.apt("-y"), "no name of a package"),
        (lambda i: i.apt("curl-"), "no name of a package"),
        (lambda i: i.run(), "one by one"),
        (lambda i: i.run("sleep", 1), "1 ….: write it as text"),
        (lambda i: i.run("x", secrets="TOKEN"), r"write it as \('TOKEN',\)"),
        (lambda i: i.run("x", secrets=("../x",)), "'../x'.*no name of an environment variable"),
        (lambda i: i.run("apt-get update"), "there is no shell; .*'apt-get', 'update'"),
        (lambda i: i.env(A=1), "write it as text"),
        (lambda i: i.env(HF_TOKEN="x"), r"name it in \.secrets\('HF_TOKEN'\)"),
        (lambda i: i.secrets("A B"), "no name of an environment variable"),
        (lambda _: sk.Image(python="3"), "write it like '3.12'"),
        (lambda _: sk.Image(platform="linux/amd46"), "Did you mean 'linux/amd64'"),
    ],
)
def test_what_can_not_be_in_an_image(make, match):
    with pytest.raises(SpecError, match=match):
        make(sk.Image())


def test_the_root_s_image_is_the_app_s():
    @sk.service(image=sk.Image().apt("ffmpeg"))
    class Inner:
        @sk.endpoint
        def echo(self, x: int) -> int:
            return x

    @sk.service
    class Root:
        inner = sk.depends(Inner)

        @sk.endpoint
        def echo(self, x: int) -> int:
            return x

    assert describe(Inner).image == sk.Image().apt("ffmpeg")
    assert describe(Root).image == sk.Image()
    inner = describe(Inner).services[0], describe(Root).services[0]
    assert inner[0].process_revision == inner[1].process_revision


def read(tmp_path, text: str, service: str = "") -> Image:
    (tmp_path / "app.py").write_text(text)
    return image_of(tmp_path / "app.py", service)


CHAIN = "sk.Image('b', python='3.12').apt('ffmpeg').run('x', 'y', secrets=('T',)).env(A='1')"
EXPECTED = Image("b", python="3.12").apt("ffmpeg").run("x", "y", secrets=("T",)).env(A="1")


@pytest.mark.parametrize(
    "text",
    [
        f"import nowhere\n@sk.service(image={CHAIN})\nclass A: ...\n",
        f"BOX = {CHAIN}\n@sk.service(image=BOX)\nclass A: ...\n",
        "BASE = sk.Image('b', python='3.12')\n@service(image=BASE.apt('ffmpeg').run('x', 'y', secrets=['T']).env(A='1'))\nclass A: ...",
        f"@sk.service(image={CHAIN})\nclass A: ...\n@sk.service(image={CHAIN})\nclass B: ...\n",
        f"@sk.service(gpu=1, image={CHAIN.replace('sk.', '')})\nclass A: ...\n@sk.service\nclass B: ...",
    ],
)
def test_what_a_module_declares_is_read(tmp_path, text):
    assert read(tmp_path, text) == EXPECTED
    assert read(tmp_path, text, "A") == EXPECTED
    assert read(tmp_path, text, "C") == Image()


@pytest.mark.parametrize(
    ("image", "error", "match"),
    [
        ("make()", ConfigError, r"app\.py:1: image=make\(\) is not read without importing"),
        ("X", ConfigError, "image=X is not read"),
        ("sk.Image(BASE)", ConfigError, "no literal"),
        ("sk.Image().apt(*NAMES)", ConfigError, "no literal"),
        ("sk.Image().env(**VARIABLES)", ConfigError, "no literal"),
        ("sk.Image(bsae='x')", ConfigError, "bsae"),
        ("sk.Image().run('x', secrets=(NAME,))", ConfigError, "no literal"),
        ("sk.Image().run('x', secret='T')", ConfigError, "secret"),
        ("sk.Image().run('x', secrets='T')", SpecError, r"app\.py:1: Image\.run"),
        ("sk.Image().apt('a b')", SpecError, r"app\.py:1: Image\.apt"),
        ("sk.Image().render('x')", ConfigError, "is not read"),
    ],
)
def test_what_is_no_literal(tmp_path, image, error, match):
    with pytest.raises(error, match=match):
        read(tmp_path, f"@sk.service(image={image})\nclass A: ...\n")


def test_several_images_need_a_name(tmp_path):
    text = "@sk.service(image=sk.Image('a'))\nclass A: ...\n@sk.service(image=sk.Image('b'))\nclass B: ...\n"
    with pytest.raises(ConfigError, match=r"several images \(lines 1, 3\); name the root service"):
        read(tmp_path, text)
    assert read(tmp_path, text, "B").base == "b"
