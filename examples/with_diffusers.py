"""diffusers: train a UNet to predict the noise in images, then generate images with it."""

from __future__ import annotations

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

SIZE, BATCH, STEPS = 16, 2, 10


def unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=SIZE,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """Return the training losses, mean colours of generated images, and the dispatch report."""
    torch.manual_seed(0)
    model = unet()
    if dispatch:
        add_tvm_dispatch(model)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    model.train()
    for _ in range(STEPS):
        clean = torch.rand(BATCH, 3, SIZE, SIZE) * 2 - 1
        noise = torch.randn_like(clean)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (BATCH,))
        noisy = noise_scheduler.add_noise(clean, noise, timesteps)
        predicted = model(noisy, timesteps, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(predicted, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    pipeline = DDPMPipeline(unet=model, scheduler=noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        batch_size=BATCH, num_inference_steps=10, output_type="np", return_dict=False
    )[0]
    losses += [float(pictures[..., colour].mean()) for colour in range(3)]
    return losses, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
