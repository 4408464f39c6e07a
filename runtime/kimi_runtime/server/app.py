"""The router's HTTP app: OpenAI's API, health, readiness, metrics, API keys."""

from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from kimi_runtime.auth import OPEN_PATHS
from kimi_runtime.errors import ConfigError, NotFound, Unauthorized, Unavailable
from kimi_runtime.protocol.codec_k2 import K2Codec
from kimi_runtime.protocol.vocabulary import Vocabulary
from kimi_runtime.router.service import Router
from kimi_runtime.server.asgi import Traced
from kimi_runtime.server.faults import openai_error
from kimi_runtime.server.metrics import CONTENT_TYPE, RouterMetrics
from kimi_runtime.server.openai import OpenAiApi
from kimi_runtime.spec.api_keys import key_digest, read_tenants
from kimi_runtime.spec.router import RouterSpec

KEYLESS_PATHS = OPEN_PATHS | {"/signals"}
"""What probes, scrapers and the operator read, none of whom has an API key."""
NOT_STORED = {"cache-control": "no-store"}


class ApiKeys:
    """Who may call: API keys, each with its tenant."""

    def __init__(self, tenants: dict[bytes, str] | None) -> None:
        """Digests of keys to tenants; None: everyone may call, as the tenant `default`."""
        self._tenants = tenants

    async def admit(self, scope: Scope) -> None:
        """Note the caller's tenant in the scope; Unauthorized without a valid key."""
        scope["kimistack.tenant"] = "default"
        if self._tenants is None or scope["path"] in KEYLESS_PATHS:
            return
        given = next((v for k, v in scope["headers"] if k == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise Unauthorized("send an API key as 'Authorization: Bearer KEY'")
        tenant = self._tenants.get(key_digest(key.strip()))
        if tenant is None:
            raise Unauthorized("the API key is not known here")
        scope["kimistack.tenant"] = tenant


def read_api_keys(path: Path | None) -> ApiKeys:
    """The keys of a file; without one everyone may call. ConfigError if it is no file of keys."""
    return ApiKeys(None if path is None else read_tenants(path))


def open_codec(spec: RouterSpec, vocabulary: Vocabulary) -> K2Codec:
    """The codec of the model's family."""
    if spec.family != "k2":
        raise ConfigError(
            f"family is {spec.family!r}: this release speaks only the k2 family's format"
        )
    return K2Codec(vocabulary)


def router_app(router: Router, codec: K2Codec, keys: ApiKeys) -> FastAPI:
    """The app of a running router."""
    metrics = RouterMetrics(router)
    api = OpenAiApi(router, codec, metrics)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    async def healthz(request: Request) -> Response:
        del request
        return JSONResponse({"status": "ok", "name": router.spec.name})

    async def readyz(request: Request) -> Response:
        del request
        if router.admission.closing:
            raise Unavailable("this router is shutting down")
        if router.parking.asleep:  # a request is what wakes the deployment, so it must come here
            return JSONResponse({"status": "asleep", "passed": router.readiness.passed})
        if router.readiness.obstacle is not None:
            raise Unavailable(f"not ready: {router.readiness.obstacle}")
        return JSONResponse({"status": "ready", "passed": router.readiness.passed})

    async def show_metrics(request: Request) -> Response:
        del request
        return Response(metrics.text(), headers={"content-type": CONTENT_TYPE.decode()})

    async def signals(request: Request) -> Response:
        del request
        text = router.signals().model_dump_json()
        return Response(text, media_type="application/json", headers=NOT_STORED)

    async def models(request: Request) -> Response:
        del request
        return JSONResponse(api.models())

    async def model(request: Request) -> Response:
        return JSONResponse(api.model(request.path_params["name"]))

    app.add_route("/v1/chat/completions", api.chat_completions, ["POST"])
    app.add_route("/v1/completions", api.completions, ["POST"])

    async def end_session(request: Request) -> Response:
        name = request.path_params["name"]
        if not router.turns.end(request.scope["kimistack.tenant"], name):
            raise NotFound(f"no conversation is called {name[:100]!r} here", param="name")
        return Response(status_code=204)

    app.add_route("/v1/sessions/{name:path}", end_session, ["DELETE"])
    app.add_route("/v1/models", models, ["GET"])
    app.add_route("/v1/models/{name:path}", model, ["GET"])
    app.add_route("/healthz", healthz, ["GET"])
    app.add_route("/readyz", readyz, ["GET"])
    app.add_route("/metrics", show_metrics, ["GET"])
    app.add_route("/signals", signals, ["GET"])
    raise_http_errors(app)
    app.add_middleware(
        Traced,
        render=openai_error,
        observe=metrics.observe,
        admit=keys.admit,
        closing=lambda: router.admission.closing,
    )
    return app


def raise_http_errors(app: FastAPI) -> None:
    """Let 404 and 405 reach `Traced`, which answers every error in one form."""

    async def again(request: Request, error: Exception) -> Response:
        del request
        raise error

    app.add_exception_handler(HTTPException, again)
