"""Find the colours of a picture: an upload in, a picture out, and a page to try it with."""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

import servekit as sk

PAGE = """<!doctype html><title>Colours</title>
<form action="/swatch" method="post" enctype="multipart/form-data" target="answer">
<input type="file" name="image" accept="image/*" required>
<label>colours <input type="number" name="colours" value="5" min="1" max="16"></label>
<button>Find them</button></form>
<iframe name="answer" style="border:0;width:100%;height:12em"></iframe>"""


@dataclass
class Colour:
    rgb: str
    share: float


@sk.service
class Palette:
    @sk.batched(max_size=8)
    def colours(self, images: list[Image.Image], counts: list[int]) -> list[list[Colour]]:
        """Return each picture's main colours, the most frequent first (median cut)."""
        return [main_colours(image, count) for image, count in zip(images, counts, strict=True)]


@sk.service(limits=sk.Limits(max_body="20MiB"))
class Colours:
    palette = sk.depends(Palette)

    @sk.endpoint
    async def find(self, image: Image.Image, colours: int = 5) -> list[Colour]:
        """Name the main colours of a picture."""
        return await self.palette.colours.remote(image, colours)

    @sk.endpoint
    async def swatch(self, image: Image.Image, colours: int = 5) -> Image.Image:
        """Draw the main colours of a picture, each as wide as its share."""
        found = await self.palette.colours.remote(image, colours)
        drawn = Image.new("RGB", (400, 80))
        pen, left = ImageDraw.Draw(drawn), 0.0
        for colour in found:
            right = left + colour.share * drawn.width
            pen.rectangle((left, 0, right, drawn.height), fill=colour.rgb)
            left = right
        return drawn

    @sk.mount_asgi("/page")
    def page(self) -> Starlette:
        async def show(_: Request) -> HTMLResponse:
            return HTMLResponse(PAGE)

        return Starlette(routes=[Route("/", show)])


def main_colours(image: Image.Image, count: int) -> list[Colour]:
    small = image.convert("RGB").resize((128, 128), Image.Resampling.NEAREST).quantize(count)
    used = np.bincount(np.asarray(small).ravel(), minlength=count)
    palette = np.asarray(small.getpalette()).reshape(-1, 3)
    order = [int(index) for index in np.argsort(-used) if used[index]]
    return [
        Colour("#{:02x}{:02x}{:02x}".format(*palette[index]), float(used[index] / used.sum()))
        for index in order
    ]
