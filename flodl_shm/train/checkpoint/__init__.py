"""Checkpoints on disk: written by ranks and the launcher, found again by a later launcher.

    work folder   STEM.RUN_ID.SAVE.tmp/   ranks put their files here, hashed and synced
    checkpoint    STEM-000000012345/      the same folder renamed, once its manifest is written
    owner         STEM.RUN_ID.owner       locked as long as the run lives: its work is not stale

names, durable, manifest, folder, find, owner and room import neither torch nor numpy: they are the
launcher's. tensors, tree, snapshot, rng, saver and restore are the ranks'. Nothing is ever pickled.
"""
