"""The application: routes, errors and limits around a model that is served."""

from fastapi import FastAPI

import kvspan
from kvspan.server.errors import add_handlers
from kvspan.server.limits import BodyLimit, KeyCheck, Refusals
from kvspan.server.live import feed
from kvspan.server.routes import completions, messages, models, responses
from kvspan.server.served import NOTE, Served


def create_app(served: Served) -> FastAPI:
    """An ASGI application.

    Args:
        served: the model, which has been started.
    """
    config = served.config
    app = FastAPI(
        title="kvspan",
        version=kvspan.__version__,
        root_path=config.root_path or "",
        docs_url=None,
        redoc_url=None,
    )
    app.state.served = served
    app.state.watch = feed.Watch()
    add_handlers(app)
    for each in (completions, models, responses, messages, feed):
        app.include_router(each.router)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_size)
    if config.api_key:
        app.add_middleware(KeyCheck, keys=config.api_key)
    if config.allowed_origins:
        _allow(app, config.allowed_origins)
    app.add_middleware(Refusals, counter=served.llm.meter.refused)
    return app


def _allow(app: FastAPI, origins: tuple[str, ...]) -> None:
    from fastapi.middleware.cors import CORSMiddleware

    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[NOTE, "Retry-After"],
    )
