"""`PIL.Image.Image` as a type of parameters and results: decoded on the way in, encoded on the way out.

Pillow is imported by the calls, never by this module. Bodies are hostile: only the formats below are
tried, and an image's size is looked at before its pixels are decoded.
"""

import io
import sys
from typing import TYPE_CHECKING, Any, ClassVar, cast

from servekit.core.call import Buffer
from servekit.spec import segment
from servekit.spec.media import Media
from servekit.spec.raw import JPEG, PNG, WEBP, RawError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 64 * 2**20
"""Largest image from outside, in pixels; decoded it has up to four bytes for each."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_WRITTEN = {PNG: "PNG", JPEG: "JPEG", WEBP: "WEBP"}
_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
"""Modes whose pixels are all there is to an image; others travel as TIFF, which knows all modes."""
_TIFF = "image/tiff"


class ImageMedia(Media):
    """Of an image hint."""

    __slots__ = ()

    form = "image"
    wanted = "an image as a base64 string"
    json_schema: ClassVar[dict[str, Any]] = {
        "type": "string",
        "contentEncoding": "base64",
        "contentMediaType": PNG,
        "description": "An image: PNG, JPEG, WebP, GIF, BMP or TIFF; answers are PNG.",
    }

    def read_raw(self, media_type: str, data: Buffer) -> "Image":  # noqa: ARG002
        """Decode an image; its bytes say which format it is, the media type doesn't matter."""
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415

        try:
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise RawError(
                    "image_size",
                    f"an image of {width} x {height} is over {MAX_PIXELS} pixels",
                )
            image.load()
        except UnidentifiedImageError:
            wanted = ", ".join(_FORMATS)
            raise RawError("image_type", f"wanted an image ({wanted}), got other bytes") from None
        except RawError:
            raise
        except Exception as error:  # noqa: BLE001  (decoders of broken images raise nearly anything)
            raise RawError("image_broken", f"the image is broken: {str(error)[:100]}") from None
        return image

    def write_raw(self, media_type: str, value: "Image") -> bytes:
        """Encode an image; JPEG knows neither transparency nor palettes, so it gets RGB."""
        name = "TIFF" if media_type == _TIFF else _WRITTEN.get(media_type, "PNG")
        if name == "JPEG" and value.mode not in ("L", "RGB", "CMYK"):
            value = value.convert("RGB")
        into = io.BytesIO()
        try:
            value.save(into, format=name)
        except (OSError, ValueError) as error:
            raise RawError("image_mode", f"{error}; convert it to RGB first") from None
        return into.getvalue()

    def check(self, value: object) -> None:
        """Check that a value is an image."""
        if image_hint() is None or not isinstance(value, image_hint()):
            raise RawError("image_type", f"wanted a PIL image, got {type(value).__name__}")

    def put(self, value: "Image", segments: list[Buffer]) -> dict[str, Any]:
        """Append an image's pixels, which neither side has to compress."""
        if value.mode not in _CHANNELS:
            return segment.put_bytes(self.write_raw(_TIFF, value), segments)
        holder = segment.put_bytes(value.tobytes(), segments)
        return holder | {"mode": value.mode, "size": value.size}

    def get(self, holder: dict[str, Any], data: Any) -> "Image":
        """Return the image of a stand-in and its segment."""
        if "mode" not in holder or hasattr(data, "content_type"):
            return cast("Image", super().get(holder, data))
        from PIL import Image  # noqa: PLC0415

        mode, size = holder["mode"], holder.get("size")
        channels = _CHANNELS.get(mode)
        match size:
            case [int(width), int(height)] if (
                channels and min(width, height) > 0 and width * height * channels == len(data)
            ):
                return Image.frombytes(mode, (width, height), data)
            case _:
                raise RawError("image_type", "an image's size doesn't match its pixels")


def image_hint() -> Any:
    """Return the type that an author writes; None while nobody has imported Pillow."""
    module = sys.modules.get("PIL.Image")
    return None if module is None else module.Image
