"""Print the requirements of the project's extras: what an image installs before the project itself.

    python3 requirements.py PYPROJECT [EXTRA ...]

So the layer of the dependencies stays the same while the sources change.
"""

import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
wanted = [*project["dependencies"], *(line for name in sys.argv[2:] for line in extras[name])]
sys.stdout.write("\n".join(wanted) + "\n")
