"""A ClientApp as any Flower user has one; nothing in it knows FedLens. (The data comes from
task.py, to keep the example short.)
"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedlens_app.task import Stripes, data_of

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = Stripes().model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["client"])
    columns = data_of(client).columns
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(columns["x"].split(16), columns["y"].split(16), strict=True):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord(
        {"num-examples": len(columns["y"]), "train_loss": float(loss), "client": client}
    )
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )
