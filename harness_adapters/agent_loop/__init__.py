"""The white-box agent loop: tools and a conversation, without a harness product."""
