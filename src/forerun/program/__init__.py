"""The pure step: state, optimizer chain, `build(job, mesh) -> Program` for real devices and for descriptions alike.

What comes out is a function, its abstract arguments and their shardings. Nothing here knows files or clouds.
"""
