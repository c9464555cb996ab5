"""Every format that data lies in, behind one `Store`; numpy only."""
