"""One device for the whole run (EPCOMM_DEVICE, else the CPU), a time limit a test, a list of skips."""

import os
from collections import Counter

import pytest

os.environ.setdefault("EPCOMM_DEVICE", "cpu")

import ranks  # after the line above: it reads EPCOMM_DEVICE

TIME_LIMIT = 120  # seconds a test


def pytest_configure(config):
    if ranks.on_gpus():
        try:
            ranks.device_count()
        except Exception as error:
            raise pytest.UsageError(f"EPCOMM_DEVICE=cuda, but CUDA cannot be used: {error}") from error


def pytest_report_header(config):
    return f"epcomm: on {ranks.device_count()} GPUs" if ranks.on_gpus() else "epcomm: on the CPU device"


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIME_LIMIT))


def pytest_sessionfinish(session):
    ranks.Pool.close()


def pytest_terminal_summary(terminalreporter):
    """Name the tests that this machine has too few devices for."""
    reasons = Counter()
    names = []
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        if reason.startswith("needs ") and reason.endswith(" devices"):
            reasons[reason] += 1
            names.append(f"{reason}: {report.nodeid}")
    if names:
        terminalreporter.section("skipped for want of devices")
        for name in sorted(names):
            terminalreporter.line(name)
        terminalreporter.line(", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())))
