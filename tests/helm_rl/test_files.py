"""Outputs are whole or absent: under exceptions, a full disk, a kill in the middle, over what stands already."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from helm_rl import files
from helm_rl.errors import UserError
from helm_rl.files import atomic_file, atomic_folder, check_outputs, kept_to_one, refuse_existing, write_text


def content(folder: Path) -> dict[str, str]:
    """Relative path -> text of every file below `folder`, hidden ones too."""
    return {str(f.relative_to(folder)): f.read_text() for f in sorted(folder.rglob("*")) if f.is_file()}


def write_half(path: Path, error: BaseException) -> None:
    path.write_text("half")
    raise error


def killed(program: str, folder: Path) -> None:
    """Run `program` in `folder` until it says "now", then kill it with SIGKILL; fail if it ends by itself."""
    with subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        child.kill()
        child.wait(20)
    assert child.returncode == -signal.SIGKILL


# Files


def test_a_file_is_replaced_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "made" / "deep" / "a.txt"
    write_text(path, "alt\n")
    write_text(path, "neu µs\n")
    assert path.read_bytes() == "neu µs\n".encode()
    assert content(tmp_path) == {"made/deep/a.txt": "neu µs\n"}


def test_the_target_is_untouched_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_file(path) as aside:
        assert aside.parent == path.parent  # a rename across file systems would not be one step
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_file_keeps_its_old_content_when_the_writer_fails(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(error), atomic_file(path) as aside:
        write_half(aside, error())
    assert content(tmp_path) == {"a.txt": "old"}


def test_no_file_appears_when_the_writer_fails(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stop"), atomic_file(tmp_path / "a.txt") as aside:
        write_half(aside, ValueError("stop"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_survives_a_kill_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    killed(
        "import os, time; from pathlib import Path; from helm_rl.files import atomic_file\n"
        "with atomic_file(Path('a.txt')) as aside, open(aside, 'w') as out:\n"
        "    out.write('half'); out.flush(); os.fsync(out.fileno())\n"
        "    print('now', flush=True); time.sleep(60)\n",
        tmp_path,
    )
    assert (tmp_path / "a.txt").read_text() == "old"
    write_text(tmp_path / "a.txt", "new")  # what the kill left does not stand in the way
    assert (tmp_path / "a.txt").read_text() == "new"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("what", ["atomic_file", "atomic_folder"])
def test_a_signal_while_writing_ends_the_process_and_leaves_nothing(tmp_path: Path, what: str, number: int) -> None:
    program = (
        "import os, sys, time\nfrom pathlib import Path\nfrom helm_rl import files\n"
        f"with files.{what}(Path(sys.argv[1]) / 'x') as aside:\n"
        f"    os.kill(os.getpid(), {int(number)})\n    time.sleep(60)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=30, stderr=subprocess.DEVNULL)
    assert result.returncode in (128 + number, -number)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_while_writing_leaves_the_old_content(tmp_path: Path) -> None:
    """A limit on the size of files fails in the middle of a write, as a full disk does."""
    (tmp_path / "a.txt").write_text("old")
    program = (
        "import resource; from pathlib import Path; from helm_rl.files import write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    write_text(Path('a.txt'), 'x' * 1_000_000)\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{errno.EFBIG}\n"
    assert content(tmp_path) == {"a.txt": "old"}


@pytest.mark.parametrize("old", ["old", None])
def test_a_disk_found_full_only_by_fsync_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str | None
) -> None:
    path = tmp_path / "a.txt"
    if old is not None:
        path.write_text(old)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert content(tmp_path) == ({} if old is None else {"a.txt": old})


def test_files_and_folders_are_readable_by_others_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a.txt", "a")
        with atomic_folder(tmp_path / "b") as aside:
            (aside / "c.txt").write_text("c")
        after = os.umask(0o027)
    finally:
        os.umask(before)
    assert after == 0o027
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o750


# Folders


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    for name in ("a", "b"):
        with atomic_folder(path) as aside:
            (aside / "sub").mkdir()
            (aside / "sub" / name).write_text(name)
    assert content(tmp_path) == {"bundle/sub/b": "b"}  # nothing of the first version, nothing left aside
    assert os.listdir(tmp_path) == ["bundle"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("old", [True, False])
def test_a_folder_keeps_its_old_content_when_the_writer_fails(
    tmp_path: Path, error: type[BaseException], old: bool
) -> None:
    path = tmp_path / "bundle"
    if old:
        path.mkdir()
        (path / "a").write_text("old")
    with pytest.raises(error), atomic_folder(path) as aside:
        write_half(aside / "a", error())
    assert content(tmp_path) == ({"bundle/a": "old"} if old else {})
    assert os.listdir(tmp_path) == (["bundle"] if old else [])


def test_a_folder_whose_last_step_fails_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "a").write_text("old")
    replace, calls = os.replace, []

    def second_fails(source: Path, target: Path) -> None:
        calls.append((source, target))
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", second_fails)
    with pytest.raises(OSError, match="Input/output error"), atomic_folder(path) as aside:
        (aside / "a").write_text("new")
    assert len(calls) == 3
    assert content(tmp_path) == {"bundle/a": "old"}


def test_a_folder_on_a_full_disk_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundle"
    path.mkdir()
    (path / "a").write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), atomic_folder(path) as aside:
        (aside / "a").write_text("new")
    assert content(tmp_path) == {"bundle/a": "old"}


def test_a_folder_survives_a_kill_in_the_middle(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "a").write_text("old")
    killed(
        "import time; from pathlib import Path; from helm_rl.files import atomic_folder\n"
        "with atomic_folder(Path('bundle')) as aside:\n"
        "    (aside / 'a').write_text('half'); print('now', flush=True); time.sleep(60)\n",
        tmp_path,
    )
    assert content(tmp_path / "bundle") == {"a": "old"}


def test_a_kill_between_the_two_renames_of_a_folder_loses_neither_version(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "a").write_text("old")
    killed(
        "import os, time; from pathlib import Path; from helm_rl import files\n"
        "replace = os.replace\n"
        "def first_only(source, target):\n"
        "    replace(source, target); print('now', flush=True); time.sleep(60)\n"
        "files.os.replace = first_only\n"
        "with files.atomic_folder(Path('bundle')) as aside:\n"
        "    (aside / 'a').write_text('new')\n",
        tmp_path,
    )
    versions = [content(folder) for folder in sorted(tmp_path.iterdir())]
    assert {"a": "old"} in versions
    assert {"a": "new"} in versions


# What stands already


HOLDING = """
import sys, time
from pathlib import Path
from helm_rl.files import kept_to_one
with kept_to_one(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_a_folder_kept_to_one_process_is_free_when_that_ends(tmp_path: Path, ends: str) -> None:
    hold_s = "0.6" if ends == "by itself" else "60"
    command = [sys.executable, "-c", HOLDING, str(tmp_path), hold_s]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is being written to by another process"), kept_to_one(tmp_path):
            pass
        if ends == "killed":
            other.kill()
        with kept_to_one(tmp_path, wait_s=30.0):
            assert ends == "killed" or other.wait(5.0) == 0
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


def test_what_exists_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "bundle").mkdir()
    for path in (tmp_path / "a.txt", tmp_path / "bundle"):
        with pytest.raises(UserError, match=r"exists already.*--overwrite") as refused:
            refuse_existing(path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)
        refuse_existing(path, overwrite=True)
    refuse_existing(tmp_path / "b.txt")
    assert content(tmp_path) == {"a.txt": "old"}


def test_a_pipe_or_device_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a device or pipe, which cannot be replaced; name a file"):
        refuse_existing(tmp_path / "pipe", overwrite=True)


@pytest.mark.parametrize("target", ["folder", "nothing"])
def test_a_link_at_the_output_is_there_and_is_replaced_alone(tmp_path: Path, target: str) -> None:
    path = tmp_path / "bundle"
    path.symlink_to(target)
    if target == "folder":
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a").write_text("kept")
    with pytest.raises(UserError, match="exists already"):
        refuse_existing(path)
    with atomic_folder(path) as aside:
        (aside / "a").write_text("new")
    assert not path.is_symlink()
    assert content(tmp_path) == {"bundle/a": "new"} | ({"folder/a": "kept"} if target == "folder" else {})
    assert sorted(os.listdir(tmp_path)) == sorted({"bundle"} | ({"folder"} if target == "folder" else set()))


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_missing_parent_is_refused_and_named(tmp_path: Path, overwrite: bool) -> None:
    with pytest.raises(UserError, match="does not exist; make it first") as refused:
        refuse_existing(tmp_path / "nowhere" / "a.txt", overwrite)
    assert str(tmp_path / "nowhere") in str(refused.value)


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, so what the system would say is put in its mouth.
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(files.os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(UserError, match="cannot be written to; name another output"):
        refuse_existing(tmp_path / "a.txt", overwrite=True)
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def test_an_output_named_without_a_folder_goes_into_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse_existing(Path("a.txt"))
    write_text(Path("a.txt"), "a")
    with atomic_folder(Path("bundle")) as aside:
        (aside / "b").write_text("b")
    assert content(tmp_path) == {"a.txt": "a", "bundle/b": "b"}


def test_outputs_are_checked_together(tmp_path: Path) -> None:
    here = tmp_path / "a.json"
    check_outputs(False, json=here, plot=tmp_path / "a.png", report=None)
    for outputs, message in (
        ({"json": tmp_path / "x" / "a.json"}, "x does not exist"),
        ({"json": here, "report": here}, "--json and --report name the same file, .*a.json"),
        ({"json": here, "plot": tmp_path / "a.gif"}, r"--plot must end in .png or .svg, got .*a\.gif"),
        ({"json": tmp_path}, "is a folder; name a file"),
    ):
        with pytest.raises(UserError, match=message):
            check_outputs(True, **outputs)
    here.touch()
    with pytest.raises(UserError, match=r"a\.json exists already"):
        check_outputs(False, json=here)


def test_an_output_never_takes_the_place_of_what_is_read(tmp_path: Path) -> None:
    log, bundle = tmp_path / "log.csv", tmp_path / "bundle"
    log.touch()
    bundle.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to(log)
    inputs = ("burst", log, bundle, None, tmp_path / "missing.toml")
    check_outputs(True, inputs, json=tmp_path / "a.json", report=Path("burst"))
    for output in (log, tmp_path / "bundle" / ".." / "log.csv", link, bundle / "config.json"):
        with pytest.raises(UserError, match=r"--json .* is what is read, or lies in it; name another file"):
            check_outputs(True, inputs, json=output)
