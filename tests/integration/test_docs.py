"""The documentation is run: every block of every page, in order, as a reader would; and the reference is complete."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pages
import pytest
import servers
from pydantic.fields import FieldInfo

import dagster_resilient
from dagster_resilient import errors
from dagster_resilient.checkpoint import TrainingSession
from dagster_resilient.storage.object_store import ObjectStore

DOCS = pages.ROOT / "docs"
README = pages.ROOT / "README.md"
EVERY_PAGE = [README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("how-to/*.md"))]
REFERENCE = (DOCS / "reference.md").read_text()


def follow(page: Path, folder: Path, **environment: str) -> Path:
    """Do what a page says, and return the folder in which that was done."""
    with pages.Reader(folder, {"DAGSTER_HOME": "", **environment}, seconds=500) as reader:
        reader.follow(page)
    return reader.folder


class TestPages:
    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_the_tutorial_works_as_written(self, tmp_path: Path):
        """From an empty folder: a real daemon, a run killed by kill -9, a re-execution that goes on where it stood."""
        folder = follow(DOCS / "tutorial.md", tmp_path)
        assert len(list(folder.glob("store/decisions/*/*.json"))) == 1
        kept = {part.name for part in (folder / "store").iterdir()}
        layout = {row["key"].strip("`").split("/")[0] for row in pages.tables_under(REFERENCE, "Layout of the store")}
        assert kept <= layout

    @pytest.mark.slow
    @pytest.mark.timeout(600)
    def test_plain_scripts_work_as_written(self, tmp_path: Path):
        """Killed, resumed, started twice, stopped and woken, with the exit statuses and messages of the page."""
        follow(DOCS / "how-to/scripts.md", tmp_path)

    @pytest.mark.s3
    def test_s3_works_as_written(self, tmp_path: Path, s3_url: str, s3_server: servers.SeaweedServer):
        """With the environment variables that the page names, on a server that checks signatures."""
        variables = {
            "RESILIENT_URL": s3_url,
            "AWS_ENDPOINT_URL": s3_server.endpoint,
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
        }
        follow(DOCS / "how-to/s3.md", tmp_path, **variables)

    @pytest.mark.parametrize(
        "name",
        [
            "reference.md",
            "explanation.md",
            "how-to/storage.md",
            "how-to/cleaning.md",
            "how-to/recovery.md",
            "how-to/values.md",
        ],
    )
    def test_other_pages_work_as_written(self, name: str, tmp_path: Path):
        """Whatever they let a reader run."""
        follow(DOCS / name, tmp_path)

    @pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
    def test_links_lead_somewhere(self, page: Path):
        """To a file that is there, and to a heading of it."""
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}, which is not there"
            assert not anchor or anchor in headings(there), f"{page.name}: {target} has no heading #{anchor}"


class TestReadme:
    def test_its_python_works(self, tmp_path: Path):
        """Both examples are defined, and its asset trains and is stored when materialized."""
        blocks = [block for block in pages.blocks_of(README.read_text(), README.name) if block.language == "python"]
        materialize = (
            "own = ResilientResource(url='state')\n"
            "given = {'resilient': own, 'io_manager': ResilientIOManager(resilient=own)}\n"
            "assert dg.materialize([weights], resources=given).success\n"
            "assert dg.materialize([scores], resources=given, partition_key='2013-02-01').success\n"
            "print(sorted(own.load('weights')), own.load('scores', partition='2013-02-01'))\n"
        )
        with pages.Reader(tmp_path, {"DAGSTER_HOME": ""}) as reader:
            for block in blocks:
                reader.run(block)
            printed = reader.run(pages.Block("what follows README.md", 1, "python", materialize))
        assert printed.endswith("['bias', 'weight'] {'month': '2013-02-01'}\n")

    @pytest.mark.parametrize("page", [*EVERY_PAGE, pages.ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
    def test_make_commands_exist(self, page: Path):
        """Each that a page names is a target of the Makefile."""
        targets = set(re.findall(r"^([a-z]+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE))
        named = set(re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(), re.MULTILINE))
        assert named <= targets
        assert named or page != README

    def test_its_shell_blocks_are_make_commands(self):
        """Nothing else is left untested there."""
        blocks = [block for block in pages.blocks_of(README.read_text(), README.name) if block.language == "sh"]
        assert blocks
        for line in "".join(block.text for block in blocks).splitlines():
            assert re.fullmatch(r"make [a-z]+(\s+#.*)?", line), line


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, spelt as web hosts spell them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def shown(default: Any) -> str:
    """A default as the reference shows it."""
    if default is inspect.Parameter.empty:
        return "required"
    if inspect.isroutine(default):
        return f"{default.__module__}.{default.__name__}"
    return default if isinstance(default, str) else str(default)


def parameters(call: Callable[..., Any], *without: str) -> dict[str, str]:
    """The parameters of a call, with their defaults as shown."""
    found = inspect.signature(call).parameters
    return {name: shown(one.default) for name, one in found.items() if name not in without}


def fields(cls: Any) -> dict[str, str]:
    """The settings of a resource, with their defaults as shown."""
    own: dict[str, FieldInfo] = {
        name: cls.model_fields[name] for name in cls.model_fields if name in cls.__annotations__
    }
    return {name: "required" if one.is_required() else shown(one.default) for name, one in own.items()}


def policy() -> dict[str, str]:
    """The settings of a policy, with the values that they have by default."""
    chosen = dagster_resilient.RecoveryPolicy()
    return {one.name: shown(getattr(chosen, one.name)) for one in dataclasses.fields(chosen)}


SETTINGS = {
    "ResilientResource": lambda: fields(dagster_resilient.ResilientResource),
    "ResilientIOManager": lambda: fields(dagster_resilient.ResilientIOManager),
    "build_recovery_sensor": lambda: parameters(dagster_resilient.build_recovery_sensor),
    "build_gave_up_sensor": lambda: parameters(dagster_resilient.build_gave_up_sensor),
    "RecoveryPolicy": policy,
    "open_task": lambda: parameters(dagster_resilient.open_task),
    "Training": lambda: parameters(TrainingSession, "task"),
}


class TestReference:
    @pytest.mark.parametrize("heading", SETTINGS)
    def test_settings_and_defaults_are_those_of_the_code(self, heading: str):
        """None is missing, none is invented, and each default is the true one."""
        assert pages.defaults_shown(REFERENCE, heading) == SETTINGS[heading]()

    def test_every_public_name_is_there(self):
        """All that the package exports, and every method and attribute of what it hands out."""
        members = [
            name
            for cls in (
                dagster_resilient.Task,
                dagster_resilient.Part,
                dagster_resilient.Codec,
                TrainingSession,
                ObjectStore,
            )
            for name in [*vars(cls), *getattr(cls, "__dataclass_fields__", ())]
            if not name.startswith("_") and name not in {"sidecar_config", "is_shared"}
        ]
        for name in [*dagster_resilient.__all__, *members]:
            assert re.search(rf"`{name}\b", REFERENCE), f"the reference does not name {name}"

    def test_every_error_is_there_with_its_builtin(self):
        """As the class is defined."""
        rows = {next(iter(row.values())) for row in pages.tables_under(REFERENCE, "Errors")}
        classes = [cls for cls in vars(errors).values() if inspect.isclass(cls)]
        assert rows == {f"`{cls.__name__}` (`{cls.__bases__[-1].__name__}`)" for cls in classes}

    def test_every_tag_and_metadata_key_is_there(self):
        """All that the package writes or reads under its own prefix."""
        sources = (file.read_text() for file in Path(dagster_resilient.__file__).parent.rglob("*.py"))
        used = {name for source in sources for name in re.findall(r"[\"'](resilient/[a-z_]+)[\"']", source)}
        assert used == set(re.findall(r"`(resilient/[a-z_]+)`", REFERENCE))


class TestReader:
    """The reader must notice what is wrong, or the tests above would prove nothing."""

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("```sh\nfalse\n```", "failed"),
            ("```sh\ntrue | grep x\n```", "failed"),
            ("```python\n1 / 0\n```", "ZeroDivisionError"),
            ("```sh\necho 5 apples\n```\n<!-- test: output -->\n```text\n7 pears\n```", "was not printed: '7 pears'"),
            ("```python\nprint(1)\n```\n<!-- test: output -->\n```text\n1\n1\n```", "was not printed: '1'"),
            ("<!-- test: skip -->\n```sh\ntrue\n```", "not known"),
            ("<!-- test: skip because -->\n```sh\ntrue\n```", "not known"),
            ("<!-- test: output -->\nNo block.", "stands before no block"),
            ("```sh\ntrue\n", "not closed"),
            ("```sh\nsleep 60\n```", "time is over"),
        ],
    )
    def test_a_page_that_is_wrong_is_refused(self, text: str, said: str, tmp_path: Path):
        """With the place and the reason."""
        page = tmp_path / "wrong.md"
        page.write_text(text)
        with pages.Reader(tmp_path, seconds=3) as reader, pytest.raises(pages.PageError, match=re.escape(said)):
            reader.follow(page)

    def test_blocks_share_folder_variables_and_namespace(self, tmp_path: Path):
        """As one shell and one interpreter do; numbers and ids in a shown output may differ, words may not."""
        page = tmp_path / "right.md"
        page.write_text(
            "```python\n# file: made.py\nprint('made', 41)\n```\n"
            "```sh\nx=1\nmkdir inner\ncd inner\n```\n```sh\necho $x; python ../made.py\n```\n"
            "<!-- test: output -->\n```text\n7\n...\nmade ...\n```\n"
            "```python\nx = 3\n```\n```python\nprint(x)\n```\n<!-- test: output -->\n```text\n9\n```\n"
        )
        with pages.Reader(tmp_path, seconds=20) as reader:
            reader.follow(page)

    def test_what_a_page_started_is_ended(self, tmp_path: Path):
        """In the foreground, in the background, and orphans."""
        page = tmp_path / "processes.md"
        page.write_text(
            "<!-- test: background -->\n```sh\necho $BASHPID > 1\nsleep 600\n```\n"
            "```sh\nsleep 600 & echo $! > 2\n(sleep 600 & echo $! > 3)\n"
            "until [ -s 1 ]; do sleep 0.1; done\n```\n"
        )
        with pages.Reader(tmp_path, seconds=20) as reader:
            reader.follow(page)
            running = [int((reader.folder / name).read_text()) for name in "123"]
            assert all(pages.is_running(pid) for pid in running)
        assert not any(pages.is_running(pid) for pid in running)
