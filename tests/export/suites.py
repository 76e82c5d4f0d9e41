"""The models that ``python -m tests.export`` exports: name, module and keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, dict[str, Any]]

# One model of each family of torchvision, and the smallest image that it takes.
_TORCHVISION = {
    "alexnet": 96, "convnext_tiny": 64, "densenet121": 64, "efficientnet_b0": 64,
    "efficientnet_v2_s": 64, "googlenet": 64, "inception_v3": 96, "maxvit_t": 224,
    "mnasnet0_5": 64, "mobilenet_v2": 64, "mobilenet_v3_large": 64, "regnet_y_400mf": 64,
    "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64, "shufflenet_v2_x0_5": 64,
    "squeezenet1_1": 64, "swin_t": 64, "swin_v2_t": 64, "vgg11_bn": 64, "vit_b_32": 224,
    "wide_resnet50_2": 64, "fcn_resnet50": 64, "deeplabv3_resnet50": 64,
    "deeplabv3_mobilenet_v3_large": 64, "lraspp_mobilenet_v3_large": 64,
}  # fmt: skip
_VIDEOS = {"r3d_18": 48, "mc3_18": 48, "r2plus1d_18": 48, "s3d": 224, "mvit_v2_s": 224}
_FLOWS = {"raft_small": 128}

_TIMM = (
    "adv_inception_v3", "beit_base_patch16_224", "convnextv2_nano",
    "deit_base_distilled_patch16_224", "deit_tiny_patch16_224",
    "dm_nfnet_f0", "ghostnet_100", "inception_v3", "mobilenetv2_100",
    "mobilenetv3_large_100", "mobilevit_s", "nfnet_l0", "repvgg_a2", "swin_base_patch4_window7_224",
    "tf_efficientnet_b0", "visformer_small", "vit_base_patch14_dinov2",
    "vit_base_patch16_siglip_256",
)  # fmt: skip
# Images that are smaller than the ones that the model was made for.
_SMALLER = {"dm_nfnet_f0": 96, "nfnet_l0": 96, "mobilevit_s": 96, "repvgg_a2": 96}


def _transformers() -> Mapping[str, Callable[[], Made]]:
    from tests.architectures.table import architectures

    table = architectures()
    return {name: lambda a=a: (a.build(), a.sample()) for name, a in table.items()}  # type: ignore[misc]


def _image_model(name: str, size: int) -> Made:
    import torchvision  # type: ignore[import-untyped]

    given = {"weights": None}
    if name.startswith(("fcn_", "deeplabv3_", "lraspp_")):
        given["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):
        given |= {"aux_logits": False, "init_weights": False}  # type: ignore[dict-item]
    argument = "input" if name.startswith("lraspp_") else "x"
    return torchvision.models.get_model(name, **given), {argument: torch.randn(2, 3, size, size)}


def _video_model(name: str, size: int) -> Made:
    import torchvision

    frames = 16 if name in ("s3d", "mvit_v2_s") else 4
    model = torchvision.models.get_model(name, weights=None)
    return model, {"x": torch.randn(1, 3, frames, size, size)}


def _flow_model(name: str, size: int) -> Made:
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    images = {f"image{i}": torch.randn(1, 3, size, size) for i in (1, 2)}
    return model, {**images, "num_flow_updates": 2}


def _torchvision() -> Mapping[str, Callable[[], Made]]:
    sizes = ((_image_model, _TORCHVISION), (_video_model, _VIDEOS), (_flow_model, _FLOWS))
    return {
        name: lambda make=make, name=name, size=size: make(name, size)  # type: ignore[misc]
        for make, table in sizes
        for name, size in table.items()
    }


def _timm_model(name: str) -> Made:
    import timm

    model = timm.create_model(name, pretrained=False)
    size: tuple[int, ...] = timm.data.resolve_data_config({}, model=model)["input_size"]
    if name in _SMALLER:
        size = (3, _SMALLER[name], _SMALLER[name])
    return model, {"x": torch.randn(1, *size)}


def _timm() -> Mapping[str, Callable[[], Made]]:
    return {name: lambda name=name: _timm_model(name) for name in _TIMM}  # type: ignore[misc]


SUITES: dict[str, Callable[[], Mapping[str, Callable[[], Made]]]] = {
    "transformers": _transformers,
    "torchvision": _torchvision,
    "timm": _timm,
}


def make(suite: str, name: str) -> Made:
    """Return the module of a suite in eval mode, and forward's keyword arguments."""
    torch.manual_seed(0)
    module, sample = SUITES[suite]()[name]()
    return module.eval(), sample
