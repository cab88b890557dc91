"""The audit log: one line per call that changes something, with the caller, method, object and result."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import structlog
from attn_core.errors import AttnError

from attn_gateway.call import Context, call_of
from attn_gateway.interceptors.handlers import Continuation, Handler, behaviour_of, is_own, rebuild
from attn_gateway.logs import report
from attn_gateway.status import code_of, shortened

log = structlog.get_logger("audit")

READS = ("Get", "List", "Watch", "Generate", "Score", "Embed", "Tokenize", "AttentionMaps", "Estimate")
"""Prefixes of the names of methods that change nothing; every other method is a change."""
NAMES = ("name", "job_id", "id", "source", "model")
NAME_BYTES = 200


class Audit(grpc.aio.ServerInterceptor):
    """Writes the audit log; the contents of prompts and configs are not in it."""

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Handler | None:
        """Wrap the handler of a method that changes something, to write a line when the call ends."""
        handler = await continuation(details)
        method = details.method.rpartition("/")[2]
        if handler is None or is_own(details.method) or method.startswith(READS) or handler.request_streaming:
            return handler
        behaviour = behaviour_of(handler)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            result = "CANCELLED"
            try:
                async with aclosing(behaviour(request, context)) as answers:
                    async for answer in answers:
                        yield answer
                result = "OK"
            except Exception as error:
                result = _result(error)
                raise
            finally:
                _write(method, request, context, result)

        async def single(request: Any, context: Context) -> Any:
            result = "CANCELLED"
            try:
                answer = await behaviour(request, context)
                result = "OK"
            except Exception as error:
                result = _result(error)
                raise
            else:
                return answer
            finally:
                _write(method, request, context, result)

        return rebuild(handler, stream if inspect.isasyncgenfunction(behaviour) else single)


def _result(error: Exception) -> str:
    return code_of(error).name if isinstance(error, AttnError) else "INTERNAL"


def _write(method: str, request: Any, context: Context, result: str) -> None:
    call = call_of(context)
    named = {name: shortened(str(getattr(request, name)), NAME_BYTES) for name in NAMES if getattr(request, name, None)}
    role = "admin" if call.caller.is_admin else "user"
    peer = str(context.peer())
    facts = {"tenant": call.tenant, "role": role, "peer": peer, "call": call.request_id}
    report(log, "audit", action=method, result=result, **facts, **named)
