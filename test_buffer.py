#!/usr/bin/env python3
"""The specification of buffer.py, as tests, and its benchmark.

python test_buffer.py          what a change must keep: at most two minutes
python test_buffer.py --all    the long proofs as well: kill -9, power cuts, full disks
python test_buffer.py NAME...  only classes or tests whose names contain one of these
python test_buffer.py bench    the benchmark
"""

import http.client
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TOKEN = "a-token-for-the-tests"


class Service:
    """A real server in a subprocess, on a free port, with its own folder.

    Settings are keyword arguments. Leaving the block stops it. `folder` lets two
    services follow each other on one file.
    """

    def __init__(self, folder=None, python=sys.executable, prefix=(), **settings):
        self._own = None if folder else tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(folder or self._own.name)
        self.db = self.folder / "b.sqlite"
        self.settings = {"TOKEN": TOKEN, "ADDR": "127.0.0.1:0", "DB_PATH": self.db}
        self.settings.update(settings)
        self.command = [*prefix, python, str(HERE / "buffer.py")]
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()
        if self._own:
            self._own.cleanup()

    def start(self, **options):
        """Starts the process and waits until it says where it listens."""
        env = {**os.environ, **{k: str(v) for k, v in self.settings.items()}}
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, env=env, stderr=log, cwd=self.folder, **options
            )
        found = self.logged(r"listens on .*?(?: port (\d+))?,")
        self.port = int(found[1] or 0)

    def logged(self, pattern, seconds=20):
        """The match of a line in the log, once it is there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = self.log.read_text(errors="replace")
            found = re.search(pattern, text)
            if found:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{text}")

    def stop(self, number=signal.SIGTERM):
        """Sends a signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)

    def connect(self, timeout=30):
        """A keep-alive connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def call(self, method, path, body=None, headers=None, token=TOKEN):
        """(status, headers, body) of one request on a connection of its own."""
        connection = self.connect()
        try:
            headers = {**({"X-Token": token} if token else {}), **(headers or {})}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()
