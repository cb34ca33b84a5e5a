"""Problems to run nafi on: where data come from, never how it is matched."""
