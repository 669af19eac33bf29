"""The one room that knows torch.distributed: groups, transport, failures and the launcher."""
