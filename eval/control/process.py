"""A `helm-rl control` process that is started, signalled, scraped and killed."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_START_S = 120.0
_SCRAPE_S = 10.0


class ControlProcess:
    """Runs from the start on; `lines` counts what it logs, and `wrong_lines` what of it is no JSON."""

    def __init__(self, bundle: Path, url: str, slo_ms: float, interval_s: float) -> None:
        words = ["control", str(bundle), "--url", url, "--slo-ms", repr(slo_ms), "--interval-s", repr(interval_s)]
        self._running = subprocess.Popen(
            [sys.executable, "-m", "helm_rl.cli", *words, "--listen", "127.0.0.1:0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.lines = self.wrong_lines = 0
        self._events: dict[str, queue.Queue[dict[str, Any]]] = {name: queue.Queue() for name in ("start", "reload")}
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        try:
            self._metrics = self._events["start"].get(timeout=_START_S)["metrics"]
        except queue.Empty:
            self.kill()
            raise RuntimeError(f"the control process has not begun within {_START_S:g} s") from None

    def reload(self) -> str:
        """Send SIGHUP and return what it made of the bundle: ok or bad."""
        self._running.send_signal(signal.SIGHUP)
        try:
            return str(self._events["reload"].get(timeout=_START_S)["result"])
        except queue.Empty:
            raise RuntimeError(f"no bundle was loaded within {_START_S:g} s (exit status {self.status})") from None

    def metrics(self) -> Counter[str]:
        """Scrape it; by the sample's name and the values of its labels."""
        with urllib.request.urlopen(self._metrics, timeout=_SCRAPE_S) as answer:
            families = list(text_string_to_metric_families(answer.read().decode("utf-8")))
        samples = (sample for family in families for sample in family.samples)
        return Counter({",".join((sample.name, *sample.labels.values())): sample.value for sample in samples})

    def kill(self) -> None:
        """End it as nothing but the system can."""
        self._running.kill()
        self._running.wait()
        self._reading.join()

    def end(self) -> int:
        """Ask it to end by SIGTERM; return its exit status."""
        self._running.send_signal(signal.SIGTERM)
        try:
            return self._running.wait(_START_S)
        finally:
            self.kill()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._running.poll()

    def _read(self) -> None:
        assert self._running.stderr is not None
        with self._running.stderr as stderr:
            for line in stderr:
                self.lines += 1
                try:
                    said = json.loads(line)
                    event = said["event"]
                except (ValueError, TypeError, KeyError):
                    self.wrong_lines += 1
                    continue
                if event in self._events:
                    self._events[event].put(said)
