"""The programs of the pages for those who come from other systems."""

import ast
import re
from pathlib import Path

import pytest

import sok_keras as sok
from reference import BACKEND

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "coming_from").glob("*.md"))}


def blocks(kind):
    """Programs of a kind. One may name the backend that it needs."""
    found = []
    for name, text in PAGES.items():
        for backend, block in re.findall(rf"^```python {kind}( \w+)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            marks = pytest.mark.skipif(backend.strip() not in ("", BACKEND), reason=f"a program of {backend.strip()}")
            found.append(pytest.param(block, id=name, marks=marks))
    return found


@pytest.mark.parametrize("program", blocks("here"))
def test_our_program_runs(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "page", "exec"), {})


@pytest.mark.parametrize("program", blocks("there"))
def test_their_program_is_python(program):
    assert "sok" not in {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}


def test_each_page_has_both_programs_and_names_that_exist():
    assert len(blocks("here")) == len(blocks("there")) == len(PAGES) == 5
    for page, text in PAGES.items():
        for name in re.findall(r"\bsok\.([A-Za-z_0-9]+)(?:\.([A-Za-z_0-9]+))?", text):
            value = getattr(sok, name[0])
            assert not name[1] or hasattr(value, name[1]), (page, name)
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / "docs" / "coming_from" / link).exists(), (page, link)


def test_each_name_of_dynamicembs_page_has_its_counterpart():
    """Classes, arguments and members of the blocks of code there."""
    seeds = ROOT.parent / "shared" / "seeds"
    if not seeds.exists():
        pytest.skip(f"needs the document of DynamicEmb in {seeds}")
    (document,) = (path.read_text() for path in seeds.glob("001_*"))
    names = set()
    for block in re.findall(r"```python\n(.*?)```", document, re.DOTALL):
        for pattern in (
            r"^\s*(\w+) : ",
            r"^\s*(?:class|def|from [\w.]+ import) (\w+)",
            r"^\s*(\w+): ?[\w.\[\]]+.* =",
            r"^\s*([A-Z]+) = ",
        ):
            names.update(re.findall(pattern, block, re.MULTILINE))
    names.remove("__init__")
    assert len(names) > 50
    assert not sorted(name for name in names if not re.search(rf"\b{name}\b", PAGES["dynamicemb"]))
