"""The command-line arguments that vLLM's server reads when it creates its application."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_OFF = ("enable_fault_tolerance", "enable_offline_docs", "enable_request_id_headers")


def server_arguments() -> Any:
    return SimpleNamespace(
        **dict.fromkeys(("disable_fastapi_docs", "tokens_only"), True),
        **dict.fromkeys(_OFF, False),
        **{f"allowed_{what}": ["*"] for what in ("origins", "methods", "headers")},
        allow_credentials=False,
        log_error_stack=False,
        api_key=None,
        middleware=[],
        root_path="",
    )
