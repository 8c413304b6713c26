"""Shared fixtures. Only the model call is ever faked: `TypedEngine` "samples" given texts, everything else is real."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from importlib.resources import files

import pytest
import torch
from support.model_server import ModelServer
from support.policies import perturbed_policy, tiny_policy

from draco.policy.chat import ChatFormat
from draco.policy.policy import Policy

torch.set_num_threads(1)
for name in ("NO_PROXY", "no_proxy"):  # servers on this machine are not behind the proxy that a shell may name
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))


_cache = tempfile.TemporaryDirectory(prefix="draco-tests-")  # of checks of models: the user's is left alone
os.environ["DRACO_CACHE"] = _cache.name


@pytest.fixture(scope="session")
def policy() -> Policy:
    """The shipped policy; tests that change its weights must put them back or build their own."""
    return tiny_policy()


@pytest.fixture
def new_policy() -> Callable[[], Policy]:
    """Builds a policy whose adapter is not the identity, so that policy and reference differ."""
    return perturbed_policy


@pytest.fixture(scope="session")
def chat() -> ChatFormat:
    from transformers import AutoTokenizer

    return ChatFormat(AutoTokenizer.from_pretrained(str(files("draco.policy") / "tiny")))


@pytest.fixture
def model_server() -> Iterator[ModelServer]:
    """A model behind HTTP that answers as the test says."""
    with ModelServer() as made:
        yield made


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT is heard, here and by children: what a shell starts in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
