"""Messages with images: extracts the images of a conversation, and prepares the rest for a chat template.

{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "What is this?"}]}
{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, ...]}
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.errors import RequestError
from outrider.vision.families import FAMILIES

_IMAGE_KINDS = ("image", "image_url", "input_image")


def blind(name: str) -> RequestError:
    """The reason why a text model refuses images."""
    known = ", ".join(FAMILIES)
    return RequestError(f"{name} is a text model and cannot see images; leave them out, or load a model of type {known}")


def parted(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """The messages, with bare image parts in place of the images, and the images in order."""
    images: list[Any] = []
    said = [_without_images(message, images) for message in messages]
    return (said, images) if images else (list(messages), [])


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of parts, as templates of vision-language models take it."""
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def in_text(message: Mapping[str, Any], placeholder: str) -> dict[str, Any]:
    """A message whose content is one text, with a placeholder for each image."""
    content = message["content"]
    if isinstance(content, str) or not isinstance(content, Sequence):
        return dict(message)
    return {**message, "content": "".join(placeholder if _is_image(part) else str(part.get("text", "")) for part in content)}


def _without_images(message: Mapping[str, Any], images: list[Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if isinstance(content, str) or not isinstance(content, Sequence) or not any(map(_is_image, content)):
        return message
    images += [_image_of(part) for part in content if _is_image(part)]
    return {**message, "content": [{"type": "image"} if _is_image(part) else part for part in content]}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _IMAGE_KINDS


def _image_of(part: Mapping[str, Any]) -> Any:
    """The image in a part: an image object, a path, or the bytes of a data URL."""
    found = next((part[key] for key in ("image", "image_url", "url", "path") if part.get(key) is not None), None)
    if isinstance(found, Mapping) and "url" in found:
        found = found["url"]
    if found is None:
        raise RequestError(f"an image part has no image, only {', '.join(map(str, part))}; give image= or image_url=")
    return data_of(found) if isinstance(found, str) and found.startswith(("data:", "http:", "https:")) else found


def data_of(url: str) -> bytes:
    """The bytes of a data URL. Other URLs are refused, because a prompt must not make this machine open connections."""
    scheme, _, rest = url.partition(":")
    if scheme != "data":
        what = f"{scheme}: addresses are not opened, since a prompt could reach into the network of this machine"
        raise RequestError(f"{what}; send the image itself as a data URL (data:image/png;base64,...)")
    kind, comma, data = rest.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise RequestError("the data URL is not base64; write data:image/png;base64, and the image's bytes in base64")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"the data URL is not valid base64 ({error}); encode the bytes of the image file") from None
