"""The logger of this package; an application sets its level."""

import logging

logger = logging.getLogger("graphs")
