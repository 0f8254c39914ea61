"""The stages over Ray: session, actors, remote calls, placement, launch.

Only this package imports ray. It imports the three stages and the rooms below them.
"""
