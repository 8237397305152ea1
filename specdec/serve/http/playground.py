"""The page at `/`: static files. They need no key, since a browser that loads a page sends none."""

from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
PAGE_PATHS = frozenset({"/", *(f"/page/{file.name}" for file in FOLDER.iterdir())})
# a browser asks whether its copy is current, so that all files are of one version
CACHING = {"Cache-Control": "no-cache"}


class PageFiles(StaticFiles):
    """Of the folder `page`."""

    def __init__(self) -> None:
        super().__init__(directory=FOLDER)

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file, or 304."""
        if scope["method"] == "OPTIONS":
            return await get_options()
        response = await super().get_response(path, scope)
        response.headers.update(CACHING)
        return response


async def playground() -> Response:
    """GET /."""
    return FileResponse(FOLDER / "index.html", headers=CACHING)


async def get_options() -> Response:
    """OPTIONS of a route of GET, which some load balancers check a server by."""
    return Response(headers={"Allow": "GET, HEAD, OPTIONS"})
