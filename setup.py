"""Add configurations and Slurm scripts to the built package; all other settings are in
pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Build with examples in ``megatron_dppo/examples``, a folder that checkouts and editable
    installations lack."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in ("configs", "scripts/slurm"):
            for file in sorted(Path(folder).glob("*.*")):
                place = Path(self.build_lib, "megatron_dppo/examples", file)
                self.mkpath(str(place.parent))
                self.copy_file(str(file), str(place))


setup(cmdclass={"build_py": BuildWithExamples})
