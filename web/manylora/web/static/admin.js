// Shows how far an upload has come, and takes the eye to what a swap brought.
"use strict";

document.addEventListener("htmx:xhr:progress", (event) => {
  const bar = event.target.querySelector("progress[data-upload]");
  const { lengthComputable, loaded, total } = event.detail;
  if (!bar || !lengthComputable) return;
  const percent = Math.round((100 * loaded) / total);
  bar.value = percent;
  bar.nextElementSibling.textContent =
    percent < 100 ? `${percent} % sent` : "Sent. Checking the adapter…";
});

document.addEventListener("htmx:afterSwap", (event) => {
  const arrived = event.target.querySelector("[data-arrived]");
  if (arrived) arrived.focus();
});

function tell(words) {
  const status = document.getElementById("status");
  if (status.textContent !== words) status.textContent = words;
}

document.addEventListener("htmx:sendError", () => tell("The server cannot be reached."));
document.addEventListener("htmx:responseError", (event) =>
  tell(`The server could not do that (${event.detail.xhr.status}).`),
);
document.addEventListener("htmx:afterRequest", (event) => {
  if (event.detail.successful) tell("");
});
