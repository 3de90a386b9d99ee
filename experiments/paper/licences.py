"""The data sets of the report, by the name in its tables: who published them, on which terms."""

from __future__ import annotations

from collections.abc import Iterable

LICENCES = {
    "kuairand-pure-14d": "KuaiRand-Pure, 25 April to 8 May 2022 (Gao et al., CIKM 2022),"
    " CC BY-SA 4.0",
    "kuairand-pure": "KuaiRand-Pure (Gao et al., CIKM 2022), CC BY-SA 4.0",
    "kuairand-1k": "KuaiRand-1K (Gao et al., CIKM 2022), CC BY-SA 4.0",
    "census-income-kdd": "Census-Income (KDD), UCI Machine Learning Repository, CC BY 4.0",
    "adult": "Adult, UCI Machine Learning Repository, CC BY 4.0",
    "nycflights13": "Flights from New York City in 2013 (US Bureau of Transportation Statistics;"
    " nycflights13, H. Wickham), CC0",
    "tennis": "Tennis matches (Jeff Sackmann, Tennis Abstract, github.com/JeffSackmann),"
    " CC BY-NC-SA 4.0",
    "criteo": "Criteo display advertising challenge, on its publisher's terms",
    "avazu": "Avazu click-through rate prediction, on its publisher's terms",
    "taobao-ad": "Ad display/click data on Taobao, on its publisher's terms",
}
SYNTHETIC = "made by this project from a planted truth; no terms"
PUBLISHED = "points read off published figures, with the error of reading; no data set"


def terms(name: str) -> str:
    """Whose a data set is and on which terms."""
    if name.startswith(("synthetic", "planted")):
        return SYNTHETIC
    return LICENCES.get(name, "a data set of the user's; its terms are not known here")


def described(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name once, with its terms."""
    return [(name, terms(name)) for name in dict.fromkeys(names)]
