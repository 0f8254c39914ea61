"""The message queue between the stages: topics, leases, images, and how large messages are."""
