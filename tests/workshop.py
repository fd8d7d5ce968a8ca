"""Things that are slow to make, made once for all the processes of a test session.

Under pytest-xdist every worker is a process with session fixtures of its own. What they share is a folder:
whoever needs a thing first makes it there, the others wait. A failure is kept as well, and told by every test
that needs the thing.
"""

import json
import traceback
from contextlib import contextmanager

from filelock import FileLock, Timeout


class MakingFailed(Exception):
    """Somebody tried to make it, and could not; the text is theirs."""


class Workshop:
    """A folder of things by name, shared by processes.

    A lock goes with the process that holds it, so that nobody waits for one that has died.
    """

    def __init__(self, root):
        self.root = root
        root.mkdir(exist_ok=True)

    def thing(self, name, make):
        """The folder of a thing, and what `make(folder)` returned, which must be plain data.

        Raises:
            MakingFailed: It could not be made.
        """
        with FileLock(self._lock(name)):
            return self._made(name, make)

    def begin(self, name, make):
        """Make a thing that nobody has made or is making; a failure is kept for those who need it."""
        try:
            with FileLock(self._lock(name), timeout=0):
                if not self._outcome(name).exists():
                    self._make(name, make)
        except Timeout:
            pass  # somebody is at it

    @contextmanager
    def alone(self, name):
        """Whether this process is the one that does something, for as long as it does."""
        lock = FileLock(self._lock(name))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _made(self, name, make):
        if not self._outcome(name).exists():
            self._make(name, make)
        outcome = json.loads(self._outcome(name).read_text(encoding="utf-8"))
        if outcome["failure"] is not None:
            raise MakingFailed(f"{name}: {outcome['failure']}")
        return self.root / name, outcome["result"]

    def _make(self, name, make):
        folder, result, failure = self.root / name, None, None
        try:
            # Whoever made the folder and left no outcome died of it, and so would the next.
            folder.mkdir()
            result = make(folder)
        except FileExistsError as error:
            died = error.filename == str(folder)
            failure = "whoever was making it died" if died else traceback.format_exc()
        except Exception:  # noqa: BLE001 (told by every test that needs it)
            failure = traceback.format_exc()
        self._keep(name, {"result": result, "failure": failure})

    def _keep(self, name, outcome):
        partial = self.root / f"{name}.partial"
        partial.write_text(json.dumps(outcome), encoding="utf-8")
        partial.replace(self._outcome(name))

    def _outcome(self, name):
        return self.root / f"{name}.json"

    def _lock(self, name):
        return self.root / f"{name}.lock"
