"""Steps of an image as data: what each is, and what its key depends on."""

import servekit as sk
from servekit.packaging.docker.step import steps_of

BEFORE = "sha256:" + "1" * 64


def test_one_step_for_all_packages_and_one_for_each_command():
    image = sk.Image().run("first").apt("ffmpeg").run("second", "-v").apt("libgomp1=12.2.0-14")
    apt, first, second = steps_of(image)
    assert apt.title == "apt ffmpeg libgomp1=12.2.0-14"
    assert apt.argv[:2] == ("sh", "-c")
    assert apt.argv[3:] == ("sh", "ffmpeg", "libgomp1=12.2.0-14")
    assert (first.title, second.argv) == ("run first", ("second", "-v"))
    assert steps_of(sk.Image("base").env(A="1")) == ()


def test_names_of_packages_are_arguments_and_never_script():
    [one], [other] = (steps_of(sk.Image().apt(name)) for name in ("ffmpeg", "libgomp1"))
    assert one.argv[2] == other.argv[2]


def test_a_title_is_one_short_line():
    [step] = steps_of(sk.Image().run("python3", "-c", "print(1)\n" * 50))
    assert len(step.title) == 60
    assert step.title.startswith("run python3 -c print(1) print(1)")


def test_a_key_is_of_what_was_before_and_of_what_runs():
    made = [
        sk.Image().run("a", "b"),
        sk.Image().run("a b", ""),
        sk.Image().run("a", "b", secrets=("T",)),
        sk.Image().apt("a"),
        sk.Image().apt("a", "b"),
    ]
    keys = [steps_of(image)[0].key(before) for image in made for before in (BEFORE, "sha256:2")]
    assert len({*keys}) == len(keys)
    assert steps_of(made[0])[0].key(BEFORE) == keys[0]
