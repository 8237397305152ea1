"""The page at `/`: static files. They need no key, since a browser that loads a page sends none."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent / "page"
PAGE_PATHS = frozenset({"/", *(f"/page/{file.name}" for file in FOLDER.iterdir())})
METHODS = ("GET", "HEAD", "OPTIONS")
FILES = StaticFiles(directory=FOLDER)


def page_routes() -> list[Route]:
    return [get_route(path, _page_file) for path in sorted(PAGE_PATHS)]


async def _page_file(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2] or "index.html"
    response = await FILES.get_response(name, request.scope)
    # a browser asks whether its copy is current, so that all files are of one version
    response.headers["Cache-Control"] = "no-cache"
    return response


def get_route(path: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
    """Route a path for GET, HEAD and OPTIONS, by which some load balancers check a server."""

    async def answer(request: Request) -> Response:
        if request.method == "OPTIONS":
            return Response(headers={"Allow": ", ".join(METHODS)})
        return await handler(request)

    return Route(path, answer, methods=METHODS)
