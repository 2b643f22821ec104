"""Several models by name that share the machine: loaded when asked for, unloaded when room is needed, a process each.

`AsyncModelManager` and `ModelManager` are the faces; `model_pool` decides, `engine_loader` loads.
"""

from __future__ import annotations

from paceline.model_manager.async_model_manager import AsyncModelManager
from paceline.model_manager.blocking_model_manager import ModelManager
from paceline.model_manager.engine_loader import ModelLoader, PreparedModel, RunningModel
from paceline.model_manager.model_entry import ModelEntry
from paceline.model_manager.model_status import ModelState, ModelStatus
from paceline.model_manager.models_file import ManagerSettings, read_models_file
from paceline.model_manager.status_feed import StatusReader

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
