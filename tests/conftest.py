"""What every test runs under."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

ARM_EXTRA = ("ethosu", "tosa_reference_model")

settings.register_profile("quantmark", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("quantmark")


class RootIsAFolder:
    """Collects the repository root as a plain folder.

    It is the package under test, so it has an `__init__.py`; pytest would import that by its path, as a
    second package named after the clone's folder.
    """

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsAFolder())


def has_arm() -> bool:
    return all(find_spec(module) for module in ARM_EXTRA)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if has_arm():
        return
    for item in items:
        if item.get_closest_marker("arm"):
            item.add_marker(pytest.mark.skip(reason="needs the extra `arm`"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that tries Arm's configs among others, where the extra that they need is not installed."""
    from quantmark import ConfigError

    try:
        yield
    except ConfigError as error:
        if has_arm() or "are not installed" not in str(error):
            raise
        pytest.skip("needs the extra `arm`")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The workers of xdist share the cores; torch must not take them all in each."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
