"""Ready-made callbacks find their tools through entry points."""

import importlib.metadata

import numpy as np
import pytest

from nnx_ppo.algorithms import VideoData, callbacks, discovery


class Recorded:
    """Stands in for a logger; notes what it is asked for."""

    calls: list = []

    @classmethod
    def attach(cls, **options):
        cls.calls.append(options)
        return cls()

    def video(self, data):
        self.calls.append(data)


def install(monkeypatch, **loggers):
    points = [
        importlib.metadata.EntryPoint(name, f"{__name__}:{value.__name__}", "nnx_ppo.loggers")
        for name, value in loggers.items()
    ]
    monkeypatch.setattr(discovery, "entry_points", lambda group: points)
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda point: loggers[point.name])


def test_videos_go_to_the_active_run(monkeypatch):
    install(monkeypatch, wandb=Recorded)
    data = VideoData(np.zeros((1, 2, 2, 3), np.uint8), 7, 1.0, 1)
    callbacks.wandb_video_fn(key="walk", fps=50)(data)
    assert Recorded.calls == [{"key": "walk", "fps": 50}, data]


def test_the_extra_is_named_where_the_package_is_missing(monkeypatch):
    install(monkeypatch)
    with pytest.raises(ValueError, match=r"nnxppo-algos\[wandb\]"):
        callbacks.wandb_video_fn()
