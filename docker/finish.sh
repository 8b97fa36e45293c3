#!/bin/bash
# The last step of both images: installs the checkout, for every kind of shell and every user.
set -euo pipefail
cd /root/telescope

pip install --no-deps --no-build-isolation --no-cache-dir --editable .
# Login shells, shells of sshd and those that a cloud starts in place of the entry point do not inherit the image's PATH.
echo "PATH=$PATH" >> /etc/environment
echo "export PATH=/root/telescope/.venv/bin:\$PATH" | tee /etc/profile.d/telescope.sh >> /etc/bash.bashrc
# Another user reads the code and may write runs and models, as in /tmp.
chmod a+rx /root
install -d -m 1777 runs models evals
telescope --version
