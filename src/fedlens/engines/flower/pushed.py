"""What a site pushes, looked at by the server's front before the SuperLink sees it.

The SuperLink holds the node of a request against the key that signed it, but not the messages in
it: each names its own sender, and one that answers nothing and calls itself the SuperLink would be
handed to another site as the server's. Only random node ids stand against that, and whoever saw one
once knows it.
"""

from __future__ import annotations

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]


def objection(body: bytes) -> str | None:
    """Why the body of a push-messages request may not pass: it has to hold one reply to the server,
    by the node that the request is of."""
    request = PushMessagesRequest()
    try:
        request.ParseFromString(body)
    except DecodeError:
        return "what is no message"
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return f"{len(request.messages_list)} messages at once"
    metadata = request.messages_list[0].metadata
    if metadata.src_node_id != request.node.node_id:
        return "a message under the name of another node"
    if not metadata.reply_to_message_id or metadata.dst_node_id != SUPERLINK_NODE_ID:
        return "a message that is no reply to the server"
    return None
