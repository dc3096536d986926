"""Packed sequences with dropout between layers, cells, and losses of labels that are on the host."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

recurrent = nn.LSTM(64, 96, 2, bidirectional=True, dropout=0.3, batch_first=True).cuda()
cell, head = nn.LSTMCell(192, 128).cuda(), nn.Linear(128, 30).cuda()
optimizer = torch.optim.Adam([*recurrent.parameters(), *cell.parameters(), *head.parameters()])
frames, lengths = torch.tensor([40, 33, 25, 40]), torch.tensor([9, 5, 7, 3])
for step in range(4):
    packed = pack_padded_sequence(torch.randn(4, 40, 64, device="cuda"), frames, batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(recurrent(packed)[0])
    hidden = None
    outputs = []
    for state in states:
        hidden = cell(state, hidden)
        outputs.append(hidden[0])
    scores = head(torch.stack(outputs)).log_softmax(-1)
    targets = torch.randint(1, 30, (int(lengths.sum()),))
    if step % 2:  # cuDNN's
        loss = nn.functional.ctc_loss(scores, targets.int(), [40] * 4, lengths.tolist())
    else:
        loss = nn.functional.ctc_loss(scores, targets.cuda(), frames, lengths, zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
