"""A packed LSTM whose loss is taken where a mask says so: sizes depend on data."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(0)
embedding, lstm, head = (
    nn.Embedding(1000, 64),
    nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True),
    nn.Linear(256, 10),
)
model = nn.ModuleList([embedding, lstm, head]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for _ in range(6):
    lengths = torch.randint(5, 30, (32,))
    tokens = torch.randint(1, 1000, (32, int(lengths.max())))
    for row, length in enumerate(lengths):
        tokens[row, length:] = 0
    tokens = tokens.cuda()
    mask = tokens != 0
    packed = pack_padded_sequence(embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
    hidden, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True)
    logits, labels = head(hidden)[mask], torch.randint(0, 10, tokens.shape, device="cuda")[mask]
    assert len(logits) == int(lengths.sum()), (logits.shape, lengths.sum())
    nn.functional.cross_entropy(logits, labels).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
