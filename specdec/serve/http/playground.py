"""The page at `/`: static files. They need no key, since a browser that loads a page sends none."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
PAGE_PATHS = frozenset({"/", *(f"/page/{file.name}" for file in FOLDER.iterdir())})
METHODS = ("GET", "HEAD", "OPTIONS")
ALLOW = {"Allow": ", ".join(METHODS)}
# a browser asks whether its copy is current, so that all files are of one version
CACHING = {"Cache-Control": "no-cache"}


class PageFiles(StaticFiles):
    """Serves the folder `page`."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Answer with a file, or 304."""
        if scope["method"] == "OPTIONS":
            return _get_options()
        if scope["method"] not in METHODS:
            raise HTTPException(405, headers=ALLOW)
        response = await super().get_response(path, scope)
        response.headers.update(CACHING)
        return response


async def playground(request: Request) -> Response:
    """Answer GET /."""
    return FileResponse(FOLDER / "index.html", headers=CACHING)


def get_route(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
    """Route a path for GET, HEAD and OPTIONS, by which some load balancers check a server."""

    async def answer(request: Request) -> Response:
        return _get_options() if request.method == "OPTIONS" else await handler(request)

    return Route(path, answer, methods=METHODS)


def _get_options() -> Response:
    return Response(headers=ALLOW)
