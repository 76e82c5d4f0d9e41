"""An LSTM language model that carries its state from one piece of text to the next."""

from __future__ import annotations

import torch
from torch import nn

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

TOKENS, WIDTH, BATCH, LENGTH, EPOCHS, RATE = 50, 32, 8, 12, 2, 2.0
State = tuple[torch.Tensor, torch.Tensor]


class LanguageModel(nn.Module):
    """Two layers of LSTM between an embedding and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2)
        self.decoder = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        output, state = self.lstm(self.drop(self.encoder(tokens)), state)
        decoded = self.decoder(self.drop(output)).view(-1, TOKENS)
        return nn.functional.log_softmax(decoded, dim=1), state


def text(length: int, seed: int) -> torch.Tensor:
    """Random text as columns, one for each row of a batch."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TOKENS, (length, BATCH), generator=generator)


def pieces(source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Consecutive pieces, and what follows each token in them."""
    starts = range(0, len(source) - LENGTH, LENGTH)
    return [(source[i : i + LENGTH], source[i + 1 : i + 1 + LENGTH].reshape(-1)) for i in starts]


def zeros() -> State:
    return torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH)


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """The losses of a training and its evaluations, and what was served."""
    torch.manual_seed(0)
    model = LanguageModel()
    if dispatch:
        add_tvm_dispatch(model)
    losses = []
    for _ in range(EPOCHS):
        model.train()
        state = zeros()
        for tokens, targets in pieces(text(20 * LENGTH + 1, seed=1)):
            model.zero_grad()
            state = (state[0].detach(), state[1].detach())
            output, state = model(tokens, state)
            loss = nn.functional.nll_loss(output, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-RATE)
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            state = zeros()
            for tokens, targets in pieces(text(4 * LENGTH + 1, seed=2)):
                output, state = model(tokens, state)
                losses.append(nn.functional.nll_loss(output, targets).item())
    return losses, dispatch_report(model) if dispatch else None


if __name__ == "__main__":
    print(main()[1])
