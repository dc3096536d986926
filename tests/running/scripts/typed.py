"""Code from before `torch.device`: tensors by their types, a wrapped variable, weights that are normalized on the host."""

import torch
from torch import nn
from torch.autograd import Variable, grad
from torch.nn.utils import weight_norm

Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
Long = torch.cuda.LongTensor
critic = nn.Sequential(weight_norm(nn.Linear(256, 512)), nn.LeakyReLU(0.2), nn.Linear(512, 1))
critic.cuda()
optimizer = torch.optim.Adam(critic.parameters())
for _ in range(3):
    real = Variable(torch.rand(64, 256).type(Tensor))
    alpha = Tensor(torch.rand(64, 1).numpy())
    labels = Variable(Long([0, 1] * 32), requires_grad=False)
    mixed = (alpha * real + (1 - alpha) * Variable(Tensor(64, 256).fill_(0.5))).requires_grad_(True)
    ones = Variable(Tensor(64, 1).fill_(1.0), requires_grad=False)
    slope = grad(critic(mixed), mixed, grad_outputs=ones, create_graph=True)[0]
    loss = critic(real)[labels].mean() + ((slope.norm(2, dim=1) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(real.type(), real.cpu().type(), labels.type(), isinstance(real, Tensor), isinstance(labels, Tensor))
torch.set_default_tensor_type(torch.cuda.FloatTensor)
large = torch.zeros(2**21)
last = torch.cat([large, torch.Tensor([1e10]), torch.Tensor(3)])
torch.set_default_device("cpu")
torch.set_default_device("cuda")
larger = torch.ones(2**22)
print(last.shape, torch.Tensor(large) is large, large.is_cuda, torch.get_default_device(), larger.cpu().numpy().shape)
torch.set_default_device("cpu")
print(torch.ones(2).device)
