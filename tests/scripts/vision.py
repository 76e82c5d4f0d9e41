"""Scripts with torchvision, timm and diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.scripts.script import Door, script
from tests.scripts.training import stepped

STEPS = 8


def _trained(model: Any, call: Any, lr: float = 1e-3, steps: int = STEPS) -> Iterator[list[Any]]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for i in range(steps):
        loss = call(model, i)
        yield [stepped(optimizer, loss)]


class _Backbone(nn.Sequential):
    out_channels = 16

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, 4, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()
        )


def _targets(i: int) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(i)
    found = []
    for n in (1 + i % 3, 2):
        start = torch.rand(n, 2, generator=g) * 30
        size = 8 + torch.rand(n, 2, generator=g) * 20
        labels = torch.randint(1, 3, (n,), generator=g)
        found.append({"boxes": torch.cat([start, start + size], 1), "labels": labels})
    return found


def _detector() -> Any:
    from torchvision.models.detection import FasterRCNN
    from torchvision.models.detection.rpn import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    return FasterRCNN(
        _Backbone(),
        num_classes=3,
        min_size=64,
        max_size=64,
        rpn_pre_nms_top_n_train=50,
        rpn_post_nms_top_n_train=20,
        box_batch_size_per_image=16,
        rpn_anchor_generator=AnchorGenerator(((8, 16, 32),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 3, 2),
    )


@script("torchvision", bound=1e-3, least=0.0)
def detector_whole(door: Door) -> Iterator[list[Any]]:
    model = _detector()
    door(model)
    yield from _trained(
        model, lambda m, i: sum(m([torch.rand(3, 64, 64)] * 2, _targets(i)).values()), steps=5
    )


@script("torchvision", bound=1e-3)
def detector_parts(door: Door) -> Iterator[list[Any]]:
    """The backbone and the heads of a detector, each dispatched."""
    model = _detector()
    for part in (model.backbone, model.rpn.head, model.roi_heads.box_head):
        door(part)
    yield from _trained(
        model, lambda m, i: sum(m([torch.rand(3, 64, 64)] * 2, _targets(i)).values()), steps=8
    )


@script("torchvision")
def segmentation(door: Door) -> Iterator[list[Any]]:
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    class Features(_Backbone):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            half = self[1](self[0](x))
            return {"out": self[3](self[2](half)), "aux": half}

    model = door(FCN(Features(), FCNHead(16, 4), FCNHead(16, 4)))

    def call(m: Any, i: int) -> Tensor:
        out = m(torch.randn(2, 3, 32, 32))
        y = torch.randint(0, 4, (2, 32, 32))
        return F.cross_entropy(out["out"], y) + 0.5 * F.cross_entropy(out["aux"], y)

    yield from _trained(model, call)


@script("timm")
def timm_mixup(door: Door) -> Iterator[list[Any]]:
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV3

    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        num_classes=10,
        depth=1,
        embed_dim=32,
        num_heads=2,
        drop_path_rate=0.1,
    )
    model.blocks[0].drop_path1.drop_prob = 0.2
    door(model)
    average, mixup = (
        ModelEmaV3(model, decay=0.9),
        Mixup(mixup_alpha=0.8, num_classes=10, cutmix_alpha=1.0),
    )
    import numpy

    numpy.random.seed(0)

    def call(m: Any, i: int) -> Tensor:
        x, y = mixup(torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,)))
        average.update(m, step=i)
        return SoftTargetCrossEntropy()(m(x), y)

    yield from _trained(model, call)
    average.module.eval()
    with torch.no_grad():
        for _ in range(3):
            yield [average.module(torch.randn(4, 3, 32, 32))]


def _unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        attention_head_dim=4,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )


@script("diffusers")
def ddpm_int_timesteps(door: Door) -> Iterator[list[Any]]:
    from diffusers import DDPMScheduler

    model, scheduler = door(_unet().eval()), DDPMScheduler(num_train_timesteps=50)
    scheduler.set_timesteps(16)
    x, g = torch.randn(1, 3, 8, 8), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(model(x, int(t)).sample, t, x, generator=g).prev_sample
            yield [x]


@script("diffusers")
def diffusion_training(door: Door) -> Iterator[list[Any]]:
    from diffusers import DDIMScheduler

    model, scheduler = door(_unet()), DDIMScheduler(num_train_timesteps=50)

    def call(m: Any, i: int) -> Tensor:
        x, noise = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)
        t = torch.randint(0, 50, (2,))
        return F.mse_loss(m(scheduler.add_noise(x, noise, t), t, return_dict=False)[0], noise)

    yield from _trained(model, call)
    model.eval()
    scheduler.set_timesteps(10)
    x = torch.randn(1, 3, 8, 8)
    with torch.no_grad():
        for t in scheduler.timesteps:
            both = model(torch.cat([x, x]), t).sample
            x = scheduler.step(both[:1] + 1.5 * (both[1:] - both[:1]), t, x).prev_sample
            yield [x]


@script("diffusers")
def autoencoder_kl(door: Door) -> Iterator[list[Any]]:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(8,),
        norm_num_groups=4,
        latent_channels=2,
        sample_size=8,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
    )
    door(model, methods=("encode", "decode"))

    def call(m: Any, i: int) -> Tensor:
        x = torch.rand(2, 3, 8, 8)
        posterior = m.encode(x).latent_dist
        return F.mse_loss(m.decode(posterior.sample()).sample, x) + 1e-3 * posterior.kl().mean()

    yield from _trained(model, call)
    model.enable_slicing()
    with torch.no_grad():
        for _ in range(3):
            yield [model.decode(model.encode(torch.rand(2, 3, 8, 8)).latent_dist.mode()).sample]
