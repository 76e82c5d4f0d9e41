"""Train an LSTM language model that carries its state from one piece of text to the next."""

from __future__ import annotations

import torch
from torch import nn

from tvmbridge import DispatchReport, add_tvm_dispatch, dispatch_report

TOKENS, WIDTH, BATCH, LENGTH, EPOCHS, RATE = 50, 32, 8, 12, 2, 2.0
State = tuple[torch.Tensor, torch.Tensor]


class LanguageModel(nn.Module):
    """An LSTM of two layers between an embedding and a linear decoder."""

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
    """Return random token ids of shape (length, batch)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TOKENS, (length, BATCH), generator=generator)


def pieces(source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cut the text into consecutive pieces; return each with the token after each position."""
    starts = range(0, len(source) - LENGTH, LENGTH)
    return [(source[i : i + LENGTH], source[i + 1 : i + 1 + LENGTH].reshape(-1)) for i in starts]


def zeros() -> State:
    return torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH)


def main(dispatch: bool = True) -> tuple[list[float], DispatchReport | None]:
    """Return the losses of training and evaluation, and the dispatch report."""
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
