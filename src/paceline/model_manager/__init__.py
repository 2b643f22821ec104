"""Several models by name that share the machine: loaded when asked for, unloaded when room is needed, a process each.

`AsyncModelManager` and `ModelManager` are the two managers; `ModelPool` decides, `engine_loader` loads.
"""

from __future__ import annotations

from paceline.model_manager.blocking_model_manager import ModelManager
from paceline.model_manager.engine_loader import ModelLoader, PreparedModel, RunningModel
from paceline.model_manager.managed_model import ModelState, ModelStatus, StatusReader
from paceline.model_manager.model_pool import AsyncModelManager
from paceline.model_manager.model_settings import ManagerSettings, ModelEntry, read_models_file

__all__ = [
    "AsyncModelManager",
    "ManagerSettings",
    "ModelEntry",
    "ModelLoader",
    "ModelManager",
    "ModelState",
    "ModelStatus",
    "PreparedModel",
    "RunningModel",
    "StatusReader",
    "read_models_file",
]
