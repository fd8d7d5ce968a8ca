"""What the processes of a test session make once for all of them."""

import functools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from workshop import MakingFailed, Workshop

SPAWN = multiprocessing.get_context("spawn")


def slowly(folder):
    """Make something, long enough for the others to come, and leave a mark of who did."""
    time.sleep(0.3)
    (folder / f"made-by-{os.getpid()}").touch()
    return os.getpid()


def wanted(root):
    """What a process gets that needs the thing, and who it is."""
    folder, made_by = Workshop(root).thing("thing", slowly)
    return str(folder), made_by, [path.name for path in folder.iterdir()]


def begun(root):
    Workshop(root).begin("thing", slowly)


def fail(folder, text="no room"):
    (folder / "half").touch()
    raise ValueError(text)


def die(root):
    Workshop(root).thing("thing", lambda folder: os._exit(3))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "workshop"


@pytest.mark.slow
def test_processes_that_need_a_thing_at_once_make_it_once(root):
    with ProcessPoolExecutor(4, SPAWN) as pool:
        begins = [pool.submit(begun, root) for _ in range(2)]
        found = {str(each.result()) for each in [pool.submit(wanted, root) for _ in range(4)]}
        assert [each.result() for each in begins] == [None, None]
    assert len(found) == 1
    folder, made_by, marks = wanted(root)
    assert found == {str((folder, made_by, marks))}
    assert marks == [f"made-by-{made_by}"]
    assert made_by != os.getpid()


def test_one_that_begins_does_not_wait_for_another(root):
    workshop = Workshop(root)

    def meanwhile(folder):
        Workshop(root).begin("thing", fail)  # waiting would be for itself, without end
        return "made"

    assert workshop.thing("thing", meanwhile) == (root / "thing", "made")
    workshop.begin("thing", fail)
    assert workshop.thing("thing", fail) == (root / "thing", "made")


@pytest.mark.parametrize("begin", [True, False])
def test_a_failure_is_kept_and_told_every_time(root, begin):
    workshop = Workshop(root)
    if begin:
        workshop.begin("thing", fail)
    for text in ("no room" if begin else "first", "third"):
        with pytest.raises(MakingFailed, match=f"(?s)thing: .*ValueError: {'no room' if begin else 'first'}"):
            workshop.thing("thing", functools.partial(fail, text=text))


def test_a_file_that_is_there_already_is_a_failure_like_any_other(root):
    with pytest.raises(MakingFailed, match="FileExistsError"):
        Workshop(root).thing("thing", lambda folder: [(folder / "twice").mkdir() for _ in range(2)])


@pytest.mark.slow
def test_a_thing_whose_maker_died_is_not_tried_again(root):
    dying = SPAWN.Process(target=die, args=(root,))
    dying.start()
    dying.join()
    assert dying.exitcode == 3
    with pytest.raises(MakingFailed, match="thing: whoever was making it died"):
        Workshop(root).thing("thing", slowly)


def test_only_one_does_what_is_done_alone_until_it_has_ended(root):
    first, second = Workshop(root), Workshop(root)
    with first.alone("pool") as mine, second.alone("pool") as theirs:
        assert (mine, theirs) == (True, False)
    with second.alone("pool") as theirs:
        assert theirs
