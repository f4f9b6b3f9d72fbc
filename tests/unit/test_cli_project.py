import tomllib

import pytest

from servekit.cli.main import run
from servekit.cli.project import PLACEHOLDER, Template, create, templates
from servekit.errors import ConfigError


@pytest.mark.parametrize("template", list(Template))
def test_a_project_has_its_name_everywhere_and_no_placeholder(template, tmp_path):
    folder = create("my-App_2", template, tmp_path)
    assert folder == tmp_path / "my-App_2"
    files = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert {"app.py", "pyproject.toml", "README.md", ".gitignore", "sample.json"} <= files.keys()
    assert {"tests/test_app.py", ".servekitignore", ".github/workflows/ci.yml"} <= files.keys()
    assert "dot-" not in " ".join(files)
    assert not any(PLACEHOLDER in text for text in files.values())
    assert tomllib.loads(files["pyproject.toml"])["project"]["name"] == "my-App_2"
    assert files["README.md"].startswith("# my-App_2\n")
    assert not [name for name in files if "__pycache__" in name or name.endswith(".onnx")]


@pytest.mark.parametrize("template", list(Template))
def test_every_template_uses_the_placeholder_where_the_name_belongs(template):
    for name in ("pyproject.toml", "README.md", "app.py"):
        assert PLACEHOLDER in (templates() / template / name).read_text()


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "a/b", "../up", "/abs", "-x", "_x", "1x", "a b", "a--b", "a-", "class",
        "naïve", "x" * 61, 'a"b', "a\nb", "$(id)", "servekit", "Servekit",
    ],
)  # fmt: skip
def test_a_name_that_is_no_projects_is_refused(name, tmp_path):
    with pytest.raises(ConfigError):
        create(name, Template.PIPELINE, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        create("mine", Template.PIPELINE, tmp_path)
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["work.txt"]


def test_an_empty_folder_is_taken_and_a_file_or_link_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    assert (create("empty", Template.PIPELINE, tmp_path) / "app.py").is_file()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="no folder"):
            create(name, Template.PIPELINE, tmp_path)


def test_the_verb_prints_the_next_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "waves", "--template", "pipeline"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "cd waves" in lines
    assert "servekit dev app.py" in lines
    assert run(["init", "waves"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert run(["init", "other", "--template", "nothing"]) == 2
    assert "'classifier'" in capsys.readouterr().err.splitlines()[0]
