// Light, dark, or what the system says. The choice is the one thing that the page stores.

const NAME = "specdec-theme";

export function setUpTheme(select) {
  select.value = localStorage.getItem(NAME) ?? "";
  apply(select.value);
  select.addEventListener("change", () => {
    if (select.value) localStorage.setItem(NAME, select.value);
    else localStorage.removeItem(NAME);
    apply(select.value);
  });
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}
